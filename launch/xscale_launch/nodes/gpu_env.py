"""Environment of workers with GPUs besides their rank: variables of torch, NCCL and compilers, and CPUs near the GPU.

A variable that the user or the profile has set stays as it is.
"""

import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

GPUS = Path("/proc/driver/nvidia/gpus")
"""The driver's list of this machine's GPUs, by PCI address."""
DEVICE_FILES = Path("/dev")
PCI_DEVICES = Path("/sys/bus/pci/devices")
ALIASES = {
    "PYTORCH_ALLOC_CONF": ("PYTORCH_CUDA_ALLOC_CONF",),
    "TORCH_FR_DUMP_TEMP_FILE": ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",),
}
"""Older names of a variable: where one is set, the user has chosen."""


def gpu_variables(variables: Mapping[str, str], outputs: Path | None) -> dict[str, str]:
    """Return the variables to add for a worker with a GPU; `outputs`: the run's folder of logs, for NCCL's records.

    Memory segments grow, so that sizes which change do not fragment it; gloo connects two ranks when they first speak,
    not a thousand with a thousand; NCCL's watchdog writes its record; and compiled code is kept on the node's own disk.
    """
    added = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCH_GLOO_LAZY_INIT": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    if outputs is not None:
        added["TORCH_FR_DUMP_TEMP_FILE"] = str(outputs / "nccl-trace-rank-")
    if (caches := node_local_caches()) is not None:
        added |= {
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
        }
    chosen = [
        name
        for name in added
        if any(known in variables for known in (name, *ALIASES.get(name, ())))
    ]
    return {name: value for name, value in added.items() if name not in chosen}


def node_local_caches() -> Path | None:
    """Return this user's folder of compiled code on the node's own disk, made if needed.

    None where it cannot be made or others could write there: what lies in it is executed.
    """
    folder = Path(tempfile.gettempdir()) / f"xscale-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    private = (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    )
    return folder if private else None


def cpus_near_gpu(variables: Mapping[str, str], local_rank: int) -> frozenset[int]:
    """Return the CPUs on the NUMA node of the worker's GPU that this process may use; empty where that is not known.

    Copies from pinned memory and launches of kernels cross sockets otherwise. CUDA numbers by PCI address the GPUs that
    the process may open: a job's cgroup or a container may have some of the machine's only.
    """
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    with suppress(OSError, ValueError, IndexError):
        names = visible.split(",") if visible is not None else [str(local_rank)]
        name = names[local_rank if len(names) > 1 else 0].strip()
        gpus = [
            gpu
            for gpu in sorted(GPUS.iterdir(), key=lambda path: path.name.lower())
            if may_open(gpu)
        ]
        gpu = only_gpu_with_uuid(gpus, name) if name.startswith("GPU-") else gpus[int(name)]
        near = parse_cpu_list((PCI_DEVICES / gpu.name.lower() / "local_cpulist").read_text())
        return near & os.sched_getaffinity(0)
    return frozenset()


def may_open(gpu: Path) -> bool:
    """Return whether this process may open a GPU of the driver's list; True where that names no device file."""
    minor = driver_field(gpu, "Device Minor")
    if minor is None:
        return True
    try:
        os.close(os.open(DEVICE_FILES / f"nvidia{minor}", os.O_RDWR))
    except OSError:
        return False
    return True


def only_gpu_with_uuid(gpus: list[Path], prefix: str) -> Path:
    """Return the GPU whose UUID begins with `prefix`, which CUDA_VISIBLE_DEVICES may be; ValueError for none or two."""
    (gpu,) = [gpu for gpu in gpus if (driver_field(gpu, "GPU UUID") or "").startswith(prefix)]
    return gpu


def driver_field(gpu: Path, name: str) -> str | None:
    """Return a field of what the driver says of a GPU; None where it says nothing."""
    with suppress(OSError):
        for line in (gpu / "information").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return None


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse the kernel's list of CPUs, such as `0-3,8-11`."""
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(
        cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)
    )
