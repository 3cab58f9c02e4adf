"""Job J9: the plan's prediction of the peak memory against the measured peak."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from xscale.bench.gpu.case import CaseReporter, GpuCase, GpuContext
from xscale.bench.gpu.recipes import FINE, training_recipe
from xscale.bench.memory import compare_memory

RECOMPUTE, OFFLOAD = "parallel.recompute.every=1", "parallel.recompute.offload=true"
RECIPES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "dense 1.3B": ("dense_1b", ()),
    "dense 1.3B, recomputation": ("dense_1b", (RECOMPUTE,)),
    "dense 1.3B, recomputation, offload": ("dense_1b", (RECOMPUTE, OFFLOAD)),
    "dense 1.3B, float8": ("dense_1b", ("precision.float8=tensor",)),
    "8 experts, top-2": ("moe_gpu", ()),
    "8 experts, top-2, recomputation": ("moe_gpu", (RECOMPUTE,)),
    "64 experts, top-8": ("moe_gpu", FINE),
    "dense 1.3B, 16k tokens": (
        "dense_1b",
        ("data.sequence_length=16384", "train.micro_batch_size=1", RECOMPUTE),
    ),
}


def cases(context: GpuContext) -> list[GpuCase]:
    """One case for each recipe, in a process of its own: what a process holds is a part of the peak."""
    return [
        GpuCase(
            name,
            partial(_run, context, name),
            seconds=90.0,
            headline="prediction within 5 %",
            shares_process=context.toy,
        )
        for name in RECIPES
    ]


def _run(context: GpuContext, name: str, report: CaseReporter) -> None:
    def run() -> Mapping[str, Any]:
        recipe, overrides = RECIPES[name]
        emulated = ["precision.float8_kernel=emulated"] if context.toy and "float8" in name else []
        comparison = compare_memory(
            training_recipe(context, recipe, ["train.batch_size=8", *overrides, *emulated])
        )
        return {
            "megabytes": comparison.measured / 2**20,
            "predicted_megabytes": comparison.predicted / 2**20,
            "predicted_total_megabytes": comparison.predicted_total / 2**20,
            "reserved_megabytes": None
            if comparison.reserved is None
            else comparison.reserved / 2**20,
            "driver_megabytes": None
            if comparison.of_driver is None
            else comparison.of_driver / 2**20,
            "predicted_ratio": comparison.ratio,
            "note": f"predicted / measured {comparison.ratio:.3f}",
        }

    report.measure("plan", run)
