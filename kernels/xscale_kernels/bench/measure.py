"""Time and memory of one function, and what the device can do at most."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def milliseconds(function: Callable[[], object], device: str, seconds: float = 1.0) -> float:
    """The median time of a call, over about `seconds` of calls and at least five, after two for warming up."""
    function()
    function()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - began < seconds and len(times) < 200):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            start_time = time.perf_counter()
            function()
            times.append((time.perf_counter() - start_time) * 1e3)
    return statistics.median(times)


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
    flops = 2 * size**3 / milliseconds(lambda: a @ b, device, 0.5) * 1e3
    source = torch.randn(2**28 if device == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    moved = 2 * source.numel() * 4 / milliseconds(lambda: target.copy_(source), device, 0.5) * 1e3
    return flops, moved
