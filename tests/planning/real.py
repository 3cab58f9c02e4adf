"""The peak of the memory of real training steps: what the C library says is in use, asked after every operator.

Nothing here knows of tensors: whatever is allocated counts, by whichever thread, and whatever is freed does not.
"""

import ctypes
import gc
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train.tiny import recipe
from xscale.mesh.environment import place
from xscale.nn.tokens import Tally
from xscale.train.settings import Settings
from xscale.train.setup import ready_data, set_up

FIELDS = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]


class Info(ctypes.Structure):
    """What `mallinfo2` of the C library returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


class Watch(TorchDispatchMode):
    """Asks after each operator, and inside those of our own kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.ask = ctypes.CDLL("libc.so.6").mallinfo2
        self.ask.restype = Info
        self.most = 0

    def used(self) -> int:
        info = self.ask()
        return int(info.uordblks + info.hblkhd)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "xscale":
            with self:
                out = torch._library.custom_ops.OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        self.most = max(self.most, self.used())
        return out


def peak(folder: Path, sections: dict[str, Any]) -> int:
    """Bytes that this rank takes at most for its part of the model and its steps. Runs on every rank."""
    settings = recipe(folder, **sections)
    ready_data(settings, place())
    watch = Watch()
    # What libraries keep from a first time on is no part of a step.
    _most(settings, watch, steps=1)
    gc.collect()
    before = watch.used()
    return _most(settings, watch, steps=4) - before


def _most(settings: Settings, watch: Watch, steps: int) -> int:
    """What was in use at most in a step: in the least of those after the first, as gloo's threads may let go late."""
    parts = set_up(settings, place())
    train = settings.train
    here = train.batch_size // (train.micro_batch_size * parts.feed.ranks)
    samples = parts.feed.loader.stream(parts.feed.requests(0, train.batch_size, steps))
    peaks = []
    for step in range(steps):
        batches = [parts.feed.training(next(samples), step, train.batch_size, Tally()) for _ in range(here)]
        watch.most = 0
        with watch:
            parts.stepper.step(batches, 1e-3, lambda loss, norm: True)
        peaks.append(watch.most)
    return min(peaks[1:] or peaks)
