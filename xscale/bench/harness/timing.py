"""The timing harness of all benchmarks: sides that alternate round by round, medians, and ratios over pairs of rounds;
peak memory, and the peak rates that the device reaches.

Other processes slow all sides of a round equally, so a ratio is taken within each round, and its median over
the rounds is reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

Side = TypeVar("Side")
Field = Literal["seconds", "processor_seconds"]


@dataclass(frozen=True)
class Sample:
    """One measured call."""

    seconds: float
    """Wall time."""
    processor_seconds: float = 0.0
    """CPU time of all threads: other programs on the machine lengthen it less than the wall time."""
    result: Any = None
    """The call's return value."""


@dataclass(frozen=True)
class Timings:
    """Samples of each side, one a round, in the order of the rounds."""

    samples: Mapping[str, Sequence[Sample]]

    def values(self, side: str, field: Field = "seconds") -> list[float]:
        """Seconds of each round."""
        return [getattr(sample, field) for sample in self.samples[side]]

    def median(self, side: str, field: Field = "seconds") -> float:
        """Median over the rounds."""
        return statistics.median(self.values(side, field))

    def fastest(self, side: str, field: Field = "seconds") -> float:
        """Shortest round."""
        return min(self.values(side, field))

    def ratio(self, side: str, baseline: str, field: Field = "seconds") -> float:
        """Median over the rounds of the side's seconds over the baseline's in the same round."""
        pairs = zip(self.values(side, field), self.values(baseline, field), strict=True)
        return statistics.median(seconds / base for seconds, base in pairs)

    def difference(self, side: str, baseline: str) -> float:
        """Median over the rounds of the side's seconds less the baseline's in the same round."""
        pairs = zip(self.values(side), self.values(baseline), strict=True)
        return statistics.median(seconds - base for seconds, base in pairs)


def alternate(
    sides: Mapping[str, Side],
    clock: Callable[[Side], Sample],
    rounds: int,
    *,
    warmup: int = 1,
    swap: bool = False,
    budget_seconds: float | None = None,
    minimum_rounds: int = 1,
) -> Timings:
    """Measure each side once a round with `clock`, for `rounds` rounds after `warmup` rounds that are discarded.

    `swap` reverses the order of the sides in every other round, so that each begins as often as the other.
    `budget_seconds` ends the measurement before `rounds` rounds, but not before `minimum_rounds`.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    start = time.perf_counter()
    for number in range(warmup + rounds):
        measured = number - warmup
        if measured == 0:
            start = time.perf_counter()
        elapsed = time.perf_counter() - start
        if budget_seconds is not None and measured >= minimum_rounds and elapsed >= budget_seconds:
            break
        names = list(sides)
        for name in reversed(names) if swap and number % 2 == 0 else names:
            sample = clock(sides[name])
            if measured >= 0:
                samples[name].append(sample)
    return Timings(samples)


def host_clock(
    synchronize: Callable[[], object] | None = None,
) -> Callable[[Callable[[], object]], Sample]:
    """A clock of wall and CPU time; `synchronize` waits for the device within the measured time."""

    def clock(run: Callable[[], object]) -> Sample:
        start, processor_start = time.perf_counter(), time.process_time()
        result = run()
        if synchronize is not None:
            synchronize()
        return Sample(time.perf_counter() - start, time.process_time() - processor_start, result)

    return clock


def cuda_clock(run: Callable[[], object]) -> Sample:
    """A clock of the GPU's time between two CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    result = run()
    end.record()
    torch.cuda.synchronize()
    return Sample(float(start.elapsed_time(end)) / 1e3, result=result)


def clock_of(device: torch.device) -> Callable[[Callable[[], object]], Sample]:
    """The host's clock, which waits for a GPU to finish."""
    return (
        host_clock(lambda: torch.cuda.synchronize(device))
        if device.type == "cuda"
        else host_clock()
    )


def time_calls(
    implementations: Mapping[str, Callable[[], object]], device: str, seconds: float = 1.0
) -> Timings:
    """Time calls of each implementation.

    The implementations alternate for about `seconds` each, five rounds at least, after two for warm-up.
    """
    return alternate(
        implementations,
        cuda_clock if device == "cuda" else host_clock(),
        rounds=200,
        warmup=2,
        budget_seconds=seconds * len(implementations),
        minimum_rounds=5,
    )


def milliseconds_of(timings: Timings, name: str, device: str) -> float:
    """Milliseconds of one call: on CUDA the median; on a CPU the shortest, since other programs only lengthen it."""
    return (timings.median if device == "cuda" else timings.fastest)(name) * 1e3


def milliseconds(
    implementations: Mapping[str, Callable[[], object]], device: str, seconds: float = 1.0
) -> dict[str, float]:
    """Time of one call of each implementation in milliseconds, as `time_calls` and `milliseconds_of` have it."""
    timings = time_calls(implementations, device, seconds)
    return {name: milliseconds_of(timings, name, device) for name in implementations}


def peak_bytes(function: Callable[[], object], device: str) -> int:
    """Peak of the memory allocated during the call, above what was allocated before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        function()
    results = profile.profiler.kineto_results if profile.profiler is not None else None
    assert results is not None
    allocated = peak = 0
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak


def ceilings(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """FLOP/s of a large matmul and bytes/s of a large copy, measured now (data sheets promise more)."""
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    flops = 2 * size**3 / milliseconds({"": lambda: a @ b}, device)[""] * 1e3
    source = torch.randn(2**28 if device == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    moved = (
        2 * source.numel() * 4 / milliseconds({"": lambda: target.copy_(source)}, device)[""] * 1e3
    )
    return flops, moved
