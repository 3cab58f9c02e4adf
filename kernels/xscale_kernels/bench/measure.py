"""Time and memory of one function, and what the device can do at most."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def _once(function: Callable[[], object], device: str) -> float:
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))
    began = time.perf_counter()
    function()
    return (time.perf_counter() - began) * 1e3


def milliseconds(ways: Mapping[str, Callable[[], object]], device: str, seconds: float = 1.0) -> dict[str, float]:
    """The time of a call of each way, over about `seconds` a way and at least five calls, after two for warming up.

    The ways take turns, so that what else runs on the machine meets all of them. On CUDA the median; on a CPU the
    shortest, since all that others do there is to make a call longer.
    """
    for function in ways.values():
        function()
        function()
    times: dict[str, list[float]] = {name: [] for name in ways}
    began, rounds = time.perf_counter(), 0
    while rounds < 5 or (time.perf_counter() - began < seconds * len(ways) and rounds < 200):
        for name, function in ways.items():
            times[name].append(_once(function, device))
        rounds += 1
    return {name: statistics.median(each) if device == "cuda" else min(each) for name, each in times.items()}


def peak_bytes(function: Callable[[], object], device: str) -> int:
    """How far memory rises above what was held before the call."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    results = profile.profiler.kineto_results if profile.profiler is not None else None
    assert results is not None
    held = peak = 0
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def ceilings(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Operations and bytes a second, of a large product and a large copy in this run (datasheets promise more)."""
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    flops = 2 * size**3 / milliseconds({"": lambda: a @ b}, device)[""] * 1e3
    source = torch.randn(2**28 if device == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    moved = 2 * source.numel() * 4 / milliseconds({"": lambda: target.copy_(source)}, device)[""] * 1e3
    return flops, moved
