"""Stall of the training loop for a save: saves of several kinds that alternate, and the plan of a run's first save."""

import itertools
import pickle
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.planner import SavePlan

from xscale.bench.harness.timing import Sample, alternate, host_clock
from xscale.checkpoint.async_saver import AsyncSaver
from xscale.checkpoint.disk import Disk, HashingFile, format_bytes
from xscale.checkpoint.planner import (
    Box,
    CheckpointPlan,
    divide_plans,
    paused_garbage_collection,
    write_items,
)
from xscale.checkpoint.save import save
from xscale.core.files.file_safety import remove_folder
from xscale.mesh.consensus import Result

ELEMENTS = 1 << 20
"""Elements of each float32 tensor."""


class _UnhashedFile(HashingFile):
    """File without hashing: its checkpoints are invalid."""

    def _update_hash(self, block: memoryview) -> None:
        return


class _Unhashed(Disk):
    stream = _UnhashedFile


class _TimedFile(HashingFile):
    """File that measures the time of hashing."""

    def _update_hash(self, block: memoryview) -> None:
        start = time.thread_time()
        super()._update_hash(block)
        assert isinstance(self._disk, _Timed)
        self._disk.seconds += time.thread_time() - start


class _Timed(Disk):
    stream = _TimedFile
    seconds = 0.0
    """CPU time, which other programs on the machine do not lengthen."""


@dataclass(frozen=True)
class Stall:
    """Medians over the repeats, in seconds; the kinds of saves alternate, so that load on the machine affects all."""

    size: int
    """Bytes of the tensors."""
    repeats: int
    synchronous: float
    """A save that blocks the training loop."""
    unhashed: float
    """A synchronous save without hashing."""
    added: float
    """Difference of the two above, pair by pair: the disk hides most of the hashing."""
    hashing: float
    """CPU time of hashing within a synchronous save."""
    at_once: float
    """Stall of an async save whose copy to host memory blocks the loop."""
    background: float
    """Stall of an async save whose copy overlaps the next step's forward and backward, as in training."""

    @property
    def ratio(self) -> float:
        """Synchronous save time over the stall of an async save."""
        return self.synchronous / self.background

    @property
    def overhead_fraction(self) -> float:
        """Fraction of a synchronous save that hashing adds."""
        return self.added / self.synchronous


def stall(
    folder: Path,
    *,
    megabytes: int = 256,
    repeats: int = 9,
    work_seconds: float = 0.5,
    device: str = "cpu",
) -> Stall:
    """Save float32 tensors of `megabytes` in a temporary subfolder of `folder`, `repeats` times with each kind of save.

    `work_seconds` of matmuls stand for the forward and backward of a step.
    """
    count = max(1, (megabytes << 20) // (4 * ELEMENTS))
    tensors = {f"model.{number}": torch.randn(ELEMENTS, device=device) for number in range(count)}
    checkpoints = folder / f"bench-{time.time_ns()}"
    clock, steps = host_clock(), itertools.count(1)
    saver = AsyncSaver(checkpoints, keep_last=1)

    def blocking(disk: Disk) -> Sample:
        return clock(
            lambda: save(checkpoints, next(steps), tensors, {}, {}, keep_last=1, disk=disk)
        )

    def hashed() -> Sample:
        disk = _Timed()
        return replace(blocking(disk), result=disk.seconds)

    def asynchronous(copy_in_background: bool) -> Sample:
        started = saver.save(next(steps), tensors, {}, {}, copy_in_background=copy_in_background)
        _step(device, work_seconds)
        seconds = started.stall_seconds + saver.wait_copied()
        saver.wait()
        return Sample(seconds)

    kinds: dict[str, Callable[[], Sample]] = {
        "synchronous": hashed,
        "unhashed": lambda: blocking(_Unhashed()),
        "at_once": lambda: asynchronous(copy_in_background=False),
        "background": lambda: asynchronous(copy_in_background=True),
    }
    try:
        # Warm-up: the first copy touches new memory, the first file wakes the disk.
        saver.save(0, tensors, {}, {})
        saver.wait()
        timings = alternate(kinds, lambda kind: kind(), repeats, warmup=0, swap=True)
    finally:
        saver.wait()
        remove_folder(checkpoints.parent, checkpoints.name)
    return Stall(
        size=sum(tensor.nbytes for tensor in tensors.values()),
        repeats=repeats,
        added=timings.difference("synchronous", "unhashed"),
        hashing=statistics.median(sample.result for sample in timings.samples["synchronous"]),
        **{kind: timings.median(kind) for kind in kinds},
    )


def _step(device: str, seconds: float) -> None:
    weight = torch.randn(512, 512, device=device)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        weight = weight @ weight / 32
    if device != "cpu":
        torch.cuda.synchronize()


PLAN_BOXES, PLAN_SECONDS = 30_000, 5.0
"""A plan of so many boxes, for which all ranks wait in the first save of a run, is to take no longer than this."""
BOXES_OF_A_RANK = 30


@dataclass(frozen=True)
class FirstPlan:
    """Seconds of rank 0 for the plan of a run's first save, medians over the repeats; the network is not among them."""

    boxes: int
    ranks: int
    gather: float
    """Unpickling the boxes of each rank."""
    plan: float
    """Dividing them, and making the index."""
    scatter: float
    """Pickling the part of each rank."""

    @property
    def seconds(self) -> float:
        return self.gather + self.plan + self.scatter


def first_plan(boxes: int = PLAN_BOXES, repeats: int = 5) -> FirstPlan:
    """Plan a save of so many boxes, 30 on each rank; the other ranks are what they would send."""
    ranks = max(1, boxes // BOXES_OF_A_RANK)
    local = torch.empty(64, 1024, device="meta")

    def payload(rank: int) -> bytes:
        box = Box(local, (64 * ranks, 1024), (64 * rank, 0))
        names = [f"model.stack.blocks.{number}.ffn.up.weight" for number in range(BOXES_OF_A_RANK)]
        return pickle.dumps(
            Result(SavePlan([item for name in names for item in write_items(name, box)]))
        )

    payloads = [payload(rank) for rank in range(ranks)]
    rounds = [_time_plan(payloads) for _ in range(repeats)]
    return FirstPlan(
        ranks * BOXES_OF_A_RANK, ranks, *map(statistics.median, zip(*rounds, strict=True))
    )


def _time_plan(payloads: list[bytes]) -> tuple[float, float, float]:
    """Seconds of the steps of `plan_save` on rank 0."""
    with paused_garbage_collection():
        begin = time.perf_counter()
        gathered: list[SavePlan] = [pickle.loads(payload).value for payload in payloads]
        end_of_gather = time.perf_counter()
        plans: list[CheckpointPlan] = divide_plans(gathered)
        end_of_plan = time.perf_counter()
        for plan in plans:
            pickle.dumps(Result([plan]))
        return end_of_gather - begin, end_of_plan - end_of_gather, time.perf_counter() - end_of_plan


def show_plan(plan: FirstPlan) -> str:
    """Format the seconds of the first plan."""
    limit = f" of at most {PLAN_SECONDS:g} s" if plan.boxes == PLAN_BOXES else ""
    rows = [
        ("gather (unpickle)", plan.gather),
        ("plan", plan.plan),
        ("scatter (pickle)", plan.scatter),
    ]
    lines = [f"  {name:<36} {seconds * 1000:>10.1f} ms" for name, seconds in rows]
    head = f"plan of the first save on rank 0, {plan.boxes:,} boxes of {plan.ranks:,} ranks, without the network"
    return "\n".join(
        [head, f"{'all of it':<38} {plan.seconds * 1000:>10.1f} ms {limit}".rstrip(), *lines]
    )


def show(stall: Stall) -> str:
    """Format the times as a table."""
    size = f"{format_bytes(stall.size)} of state, medians of {stall.repeats}"
    rows = [
        ("synchronous", stall.synchronous, ""),
        ("  the same without hashing", stall.unhashed, ""),
        ("  added by hashing, pair by pair", stall.added, f"{stall.overhead_fraction:.1%} of it"),
        ("  CPU time of hashing", stall.hashing, ""),
        ("async, blocking copy", stall.at_once, f"{stall.synchronous / stall.at_once:.0f}x less"),
        ("async, copy overlaps the next step", stall.background, f"{stall.ratio:.0f}x less"),
    ]
    lines = [
        f"{name:<38} {seconds * 1000:>10.1f} ms  {note}".rstrip() for name, seconds, note in rows
    ]
    return "\n".join([f"stall of the training loop for a save of {size}", *lines])
