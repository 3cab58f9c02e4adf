"""Job J7: step times through asynchronous saves, and the time of a synchronous save."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from xscale.bench.checkpoint import stall
from xscale.bench.checkpoint_trace import trace_steps
from xscale.bench.gpu.case import CaseReporter, GpuCase, GpuContext
from xscale.bench.gpu.recipes import training_recipe

EVERY, STEPS = 15, 45


def cases(context: GpuContext) -> list[GpuCase]:
    """A run that saves 16 GB several times, and saves of tensors alone."""
    return [
        GpuCase(
            "dense 1.3B with Adam",
            partial(_trace, context),
            seconds=150.0,
            headline="no step longer than 1.1 of the median",
        ),
        GpuCase("2 GB of tensors", partial(_stall, context), seconds=80.0),
    ]


def _trace(context: GpuContext, report: CaseReporter) -> None:
    def run() -> Mapping[str, Any]:
        every, steps = context.size((EVERY, STEPS), (6, 12))
        recipe = training_recipe(context, "dense_1b", ["train.batch_size=4"])
        trace = trace_steps(recipe, steps, every)
        return {
            "milliseconds": trace.median * 1e3,
            "longest_milliseconds": trace.longest * 1e3,
            "longest_ratio": trace.longest_ratio,
            "overhead": trace.overhead,
            "trace": [round(seconds, 4) for seconds in trace.seconds],
            "note": f"a save each {every} steps: longest {trace.longest_ratio:.2f}x, {trace.overhead:+.1%} on average",
        }

    report.measure("xscale, asynchronous saves", run)


def _stall(context: GpuContext, report: CaseReporter) -> None:
    def run() -> Any:
        megabytes, repeats = context.size((2048, 2), (1, 1))
        seconds = context.size(2.0, 0.01)
        return stall(
            context.work,
            megabytes=megabytes,
            repeats=repeats,
            work_seconds=seconds,
            device=context.device,
        )

    stalls = report.attempt("stall", run)
    if stalls is not None:
        for side in ("synchronous", "unhashed", "at_once", "background"):
            report.figure(
                side,
                milliseconds=getattr(stalls, side) * 1e3,
                speedup=stalls.synchronous / getattr(stalls, side),
                baseline="synchronous",
            )
