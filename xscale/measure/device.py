"""Peak figures of devices: FLOP/s (the denominator of MFU), memory, and the bandwidth of their links."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

PEAKS = {
    # Dense bfloat16 FLOP/s, from the makers' data sheets.
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "V100": 125e12,
}


@dataclass(frozen=True)
class Device:
    """One device among others of its kind. Bytes, bytes a second in one direction, FLOP/s in bfloat16."""

    name: str
    flops: float
    memory: float
    bandwidth: float
    """Between the device and its memory."""
    link: float
    """To the devices of the same node."""
    network: float
    """To those of another node."""
    node: int
    """Devices of a node."""
    runtime: float = 0.0
    """Memory that the driver and its libraries take: an assumed figure, not measured."""
    communicator: float = 0.0
    """Memory of one NCCL communicator: assumed as well."""
    slack: float = 0.0
    """Fraction of the peak that the allocator adds by fragmentation: assumed as well."""
    reach: float = 1.0
    """Fraction of `flops` that large matmuls reach."""
    tf32: bool = False
    """Whether float32 matrices may be multiplied as TF32."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source of each figure, by field name."""

    @property
    def timed(self) -> bool:
        """Whether its speed is known."""
        return self.flops > 0

    def flops_in(self, dtype: torch.dtype) -> float:
        """FLOP/s in a dtype."""
        return self.flops if self.name == "cpu" else self.flops / slowdown(dtype, tf32=self.tf32)


HALF = (torch.bfloat16, torch.float16)


def slowdown(dtype: torch.dtype, *, tf32: bool) -> int:
    """How many times longer a GPU multiplies matrices of a dtype than those of bfloat16.

    `tf32`: whether `precision.float32_matmul` lets float32 be multiplied as TF32.
    """
    if dtype in HALF:
        return 1
    return 2 if dtype == torch.float32 and tf32 else 15


ASSUMED = {
    "runtime": "assumed: 1 GB for the CUDA context and cuBLAS; not measured",
    "communicator": "assumed: 0.2 GB of buffers for each NCCL communicator; not measured",
    "slack": "assumed: 5 % fragmentation of the caching allocator; not measured",
    "reach": "assumed: 70 % of the peak for large matmuls in bfloat16; not measured",
}
"""Sources of figures that no data sheet has."""


def _gpu(
    name: str,
    flops: float,
    memory: float,
    bandwidth: float,
    link: float,
    network: float,
    sources: Mapping[str, str],
) -> Device:
    all_sources = {**sources, **ASSUMED}
    return Device(
        *(name, flops, memory, bandwidth, link, network, 8),
        runtime=1e9,
        communicator=0.2e9,
        slack=0.05,
        reach=0.7,
        sources=all_sources,
    )


def _sheets(gpu: str, dgx: str, nvlink: str, nic: str) -> Mapping[str, str]:
    """Sources of the figures: NVIDIA's data sheets of a GPU and of the node with eight of them."""
    return {
        "flops": f"data sheet of the {gpu}: BFLOAT16 Tensor Core, half of the figure with sparsity",
        "memory": f"data sheet of the {gpu}: GPU memory",
        "bandwidth": f"data sheet of the {gpu}: GPU memory bandwidth, of which 80 % are assumed to be reached",
        "link": f"data sheet of the {gpu}: NVLink {nvlink}, half of it in each direction",
        "network": f"data sheet of the {dgx}: {nic} for each GPU",
        "node": f"data sheet of the {dgx}: 8 GPUs",
    }


DEVICES: dict[str, Device] = {
    "h100": _gpu(
        "h100",
        989e12,
        80e9,
        3.35e12,
        450e9,
        50e9,
        _sheets("H100 SXM", "DGX H100", "900 GB/s", "400 Gb/s"),
    ),
    "h200": _gpu(
        "h200",
        989e12,
        141e9,
        4.8e12,
        450e9,
        50e9,
        _sheets("H200 SXM", "DGX H200", "900 GB/s", "400 Gb/s"),
    ),
    "a100": _gpu(
        "a100",
        312e12,
        80e9,
        2.039e12,
        300e9,
        25e9,
        _sheets("A100 80GB SXM", "DGX A100", "600 GB/s", "200 Gb/s"),
    ),
    "b200": _gpu(
        "b200",
        2250e12,
        180e9,
        8e12,
        900e9,
        50e9,
        _sheets("B200 SXM in the DGX B200", "DGX B200", "1.8 TB/s", "400 Gb/s"),
    ),
}
"""Devices that a plan can target, besides `cpu`, which is the planning machine."""


GIVEN = "given on the command line"
ASSUMED_NODE = "assumed: 8, as in most nodes"


def device_of_memory(memory: float) -> Device:
    """A GPU of which only the memory is known: a plan then says what fits, without times."""
    return replace(
        _gpu("GPU", 0.0, memory, 0.0, 0.0, 0.0, {"memory": GIVEN, "node": ASSUMED_NODE}), reach=0.0
    )


def stated_device(name: str, flops: float, memory: float, bandwidth: float) -> Device:
    """A GPU by figures that the user states; its links are taken to be those of an H100 until others are given."""
    like = DEVICES["h100"]
    links = dict.fromkeys(("link", "network", "node"), "assumed: as of the h100; not stated")
    sources = {**dict.fromkeys(("flops", "memory", "bandwidth"), GIVEN), **links}
    return _gpu(name, flops, memory, bandwidth, like.link, like.network, sources)


def device_named(name: str, dtype: torch.dtype) -> Device:
    """A device by its name; `cpu` is measured here. KeyError for one that is not known."""
    if name != "cpu":
        return DEVICES[name]
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    bandwidth = _copy_bandwidth()
    # Processes of one machine communicate through its memory, with several copies.
    speed = bandwidth / 4
    shared = "assumed: a quarter of the measured bandwidth, since a message is copied several times"
    sources = {
        "flops": "measured now: the best of a few 512 x 512 matmuls",
        "memory": "this machine's, as the system says",
        "bandwidth": "measured now: the best of a few copies of 64 MB",
        "link": shared,
        "network": shared,
        "node": "one machine",
    }
    return Device("cpu", _matmul_flops(dtype), memory, bandwidth, speed, speed, 1, sources=sources)


def _copy_bandwidth() -> float:
    """Bytes/s, read and written, of the best of a few copies of 64 MB."""
    a, b = torch.ones(1 << 24), torch.empty(1 << 24)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        b.copy_(a)
        best = min(best, time.perf_counter() - start)
    return 2 * 4 * (1 << 24) / best


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of the device in `dtype`; on a CPU measured by a matmul, None for a GPU that is not listed.

    Those of float32 are TF32's where `precision.float32_matmul` allows it.
    """
    if device.type == "cpu":
        return _matmul_flops(dtype)
    name = torch.cuda.get_device_name(device)
    peak = next((peak for known, peak in PEAKS.items() if known in name), None)
    return (
        None
        if peak is None
        else peak / slowdown(dtype, tf32=torch.get_float32_matmul_precision() != "highest")
    )


CLOCK_STEP = 1e-6
"""Seconds below which a process's time on cores is not trusted."""


def _matmul_flops(dtype: torch.dtype) -> float:
    """FLOP/s of the best of a few 512 x 512 matmuls on all threads of torch, as on an idle machine.

    Beside other programs the threads wait for cores: a call's time is then that of its threads on them, if it is less.
    """
    threads = torch.get_num_threads()
    a, b = torch.ones(512, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    best = float("inf")
    for _ in range(8):
        start, start_on_cores = time.perf_counter(), time.process_time()
        a @ b
        on_cores = (time.process_time() - start_on_cores) / threads
        best = min(best, time.perf_counter() - start, max(on_cores, CLOCK_STEP))
    return float(2 * 512**3 / best)
