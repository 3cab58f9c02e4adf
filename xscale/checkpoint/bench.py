"""How long the loop waits for a save: in the background and not, side by side, and what hashing adds."""

import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from xscale.checkpoint.background import Background
from xscale.checkpoint.disk import Disk, Hashing
from xscale.checkpoint.saving import save

PIECE = 1 << 20
"""Numbers of float32 in each of the tensors."""


class _Blind(Hashing):
    """Does not hash: its checkpoints are good for nothing but a time."""

    def _take(self, until: int) -> None:
        self._hashed = until


class _Unhashed(Disk):
    stream = _Blind


@dataclass(frozen=True)
class Stall:
    """Medians over the repeats, in seconds; each repeat does one of each, so that they meet the same machine."""

    size: int
    """Bytes of the tensors."""
    repeats: int
    synchronous: float
    """A save that the loop waits for."""
    unhashed: float
    """The same without hashing."""
    background: float
    """What the loop waits for when the save goes on behind."""
    still: float
    """The same when it also promises not to change the tensors for a while, so that the copy goes on behind too."""

    @property
    def ratio(self) -> float:
        """How many times less the loop waits, without the promise."""
        return self.synchronous / self.background

    @property
    def still_ratio(self) -> float:
        """How many times less it waits with it."""
        return self.synchronous / self.still

    @property
    def hashing(self) -> float:
        """Share of a synchronous save that hashing is."""
        return 1 - self.unhashed / self.synchronous


def stall(folder: Path, *, megabytes: int = 256, repeats: int = 9, device: str = "cpu") -> Stall:
    """Save float32 tensors of `megabytes` below `folder`, which is made and removed, `repeats` times each way."""
    count = max(1, (megabytes << 20) // (4 * PIECE))
    tensors = {f"model.{number}": torch.randn(PIECE, device=device) for number in range(count)}
    place = folder / f"bench-{time.time_ns()}"
    times: dict[str, list[float]] = {"synchronous": [], "unhashed": [], "background": [], "still": []}
    saver = Background(place, keep_last=1)
    try:
        # The first copy meets memory that has never been touched, the first file a disk that sleeps.
        saver.save(0, tensors, {}, {})
        saver.settle()
        for step in range(1, 4 * repeats, 4):
            for kind, disk in (("synchronous", Disk()), ("unhashed", _Unhashed())):
                start = time.perf_counter()
                save(place, step, tensors, {}, {}, keep_last=1, disk=disk)
                times[kind].append(time.perf_counter() - start)
            for place_of, kind in enumerate(("background", "still"), 2):
                started = saver.save(step + place_of, tensors, {}, {}, still=kind == "still")
                times[kind].append(started.stall_seconds)
                saver.settle()
    finally:
        saver.settle()
        shutil.rmtree(place, ignore_errors=True)
    size = sum(tensor.nbytes for tensor in tensors.values())
    return Stall(size, repeats, **{kind: statistics.median(one) for kind, one in times.items()})
