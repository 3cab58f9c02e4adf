"""A job with planted faults: a case that hangs, one that runs out of memory, a crash, a case that raises."""

import os
import signal
import time

import torch

from xscale.bench.gpu.case import CaseReporter, GpuCase, GpuContext


def cases(context: GpuContext) -> list[GpuCase]:
    """Four faults among figures; each costs one row."""
    return [
        GpuCase("slow", slow, seconds=1.5),
        GpuCase("memory", memory),
        GpuCase("crash", crash),
        GpuCase("raises", raises),
        GpuCase("good", good),
    ]


def _figure() -> dict[str, float]:
    return {"milliseconds": 2.0, "tflops": 3.0}


def _sleep() -> dict[str, float]:
    time.sleep(60)
    return _figure()


def _allocate() -> dict[str, float]:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB")


def _crash() -> dict[str, float]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return _figure()


def slow(report: CaseReporter) -> None:
    """A side that hangs between two that do not."""
    for side, function in (("before", _figure), ("hangs", _sleep), ("after", _figure)):
        report.measure(side, function)


def memory(report: CaseReporter) -> None:
    """A side that runs out of memory between two that do not."""
    for side, function in (("before", _figure), ("large", _allocate), ("after", _figure)):
        report.measure(side, function)


def crash(report: CaseReporter) -> None:
    """A side that ends the process between two that do not."""
    for side, function in (("before", _figure), ("crashes", _crash), ("after", _figure)):
        report.measure(side, function)


def raises(report: CaseReporter) -> None:
    """A case that breaks outside of its sides."""
    raise ValueError("broken case")


def good(report: CaseReporter) -> None:
    """A case without a fault."""
    print("a line of the log")
    report.measure("ours", _figure)
