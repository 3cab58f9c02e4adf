"""Measured peak memory of real training steps: the C library's statistics after every operator.

All allocations count, from every thread, whether or not they belong to tensors.
"""

import ctypes
import gc
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.train.tiny import recipe
from xscale.mesh.environment import read_rank_info
from xscale.nn.tokens import Stats
from xscale.run.run_data import prepare_and_open_data
from xscale.settings.settings import Settings
from xscale.train.setup import set_up

FIELDS = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]


class Info(ctypes.Structure):
    """Result of the C library's `mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


MIN_BYTES = 2**16
"""Size of a new tensor from which on the memory is read: `mallinfo2` walks every free chunk of the heap."""


class Watch(TorchDispatchMode):
    """Dispatch mode that reads the memory after each operator that allocates, including those inside xscale_kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.mallinfo = ctypes.CDLL("libc.so.6").mallinfo2
        self.mallinfo.restype = Info
        self.peak = 0

    def used(self) -> int:
        info = self.mallinfo()
        return int(info.uordblks + info.hblkhd)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "xscale":
            with self:
                out = torch._library.custom_ops.OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        if allocates(out, (*args, *(kwargs or {}).values())):
            self.peak = max(self.peak, self.used())
        return out


def allocates(out: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether `out` holds a tensor of `MIN_BYTES` that is neither an argument nor a view of one."""
    return not large_storages(out) <= large_storages(arguments)


def large_storages(values: Any) -> set[int]:
    """Addresses of the storages of `values` from `MIN_BYTES` on; FSDP's may have no data at the time."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return {storage._cdata for storage in storages if storage.nbytes() >= MIN_BYTES}


def peak(folder: Path, sections: dict[str, Any]) -> int:
    """Peak bytes of this rank for its shard of the model and its steps. Runs on every rank."""
    settings = recipe(folder, **sections)
    prepare_and_open_data(settings, read_rank_info())
    watch = Watch()
    # Memory that libraries allocate once is not part of a step.
    _peak_of_steps(settings, watch, steps=1)
    gc.collect()
    before = watch.used()
    return _peak_of_steps(settings, watch, steps=3) - before


def _peak_of_steps(settings: Settings, watch: Watch, steps: int) -> int:
    """Smallest peak of the steps after the first, since gloo's threads may free memory late."""
    parts = set_up(settings, read_rank_info())
    train = settings.train
    count = train.batch_size // (train.micro_batch_size * parts.training.ranks)
    samples = parts.training.loader.stream(parts.training.requests(0, train.batch_size, steps))
    peaks = []
    for step in range(steps):
        batches = [parts.training.make(next(samples), step, train.batch_size, Stats()) for _ in range(count)]
        watch.peak = 0
        with watch:
            parts.stepper.step(batches, 1e-3)
        peaks.append(watch.peak)
    return min(peaks[1:] or peaks)
