"""Job J4: every fused operator against its definition, torch.compile and the libraries that are installed."""

import importlib
from functools import cache
from typing import Any

import torch

from xscale.bench.gpu.case import CaseReporter, GpuCase, GpuContext, free_memory
from xscale.bench.harness.timing import ceilings
from xscale.bench.operators.report import measure_case, with_compiled
from xscale_kernels.select import operators

LATER = ("packed_attention", "block_sparse_attention")
"""Operators that jobs of their own measure at more sizes; here they come last."""
FIRST = (
    "rmsnorm",
    "linear_cross_entropy",
    "grouped_gemm",
    "adamw",
    "gated_activation",
    "rope",
    "cross_entropy",
)
"""Operators of every model, in the order of the time that they take."""
HEADLINES = {
    "rmsnorm": ">= 1.0 of torch's own norm, >= 90 % of the bandwidth",
    "linear_cross_entropy": ">= 670 TFLOP/s at a vocabulary of 131k",
    "grouped_gemm": ">= 98.6 % of cuBLAS",
}
"""Goals."""
SECONDS = 0.25
"""Time of each implementation in each case."""


def cases(context: GpuContext) -> list[GpuCase]:
    """One case for each operator."""
    names = [*FIRST, *(name for name in operators() if name not in (*FIRST, *LATER)), *LATER]

    def case(operator: str) -> GpuCase:
        def run(report: CaseReporter) -> None:
            measure_operator(operator, context, report)

        return GpuCase(operator, run, seconds=75.0, headline=HEADLINES.get(operator, ""))

    return [case(name) for name in names]


def measure_operator(operator: str, context: GpuContext, report: CaseReporter) -> None:
    """Report a row for each implementation in each of the operator's cases; in a toy run in the first."""
    device = context.device
    limits = device_ceilings(device, context.toy)
    for number, case in enumerate(
        importlib.import_module(f"xscale_kernels.{operator}.cases").cases(device)
    ):
        if context.toy and number:
            return
        label = f"{operator} {case.label}".replace("torch.", "")

        def begin(way: str, label: str = label) -> bool:
            return report.begin(f"{label}: {way}")

        # A compiler for a CPU takes minutes for all operators.
        measured = with_compiled(case) if device == "cuda" else case
        seconds = 0.0 if context.toy else SECONDS
        for row in measure_case(
            operator, measured, device, baseline(measured.ways), limits, seconds, begin
        ):
            values: dict[str, Any] = {"case": label, "reason": row.refused or None}
            if row.milliseconds is None:
                refused = "refused" if row.refused and "Error" not in row.refused else "failed"
                values["status"] = "out of memory" if "out of memory" in row.refused else refused
            else:
                values |= {
                    "milliseconds": row.milliseconds,
                    "fastest_milliseconds": row.fastest,
                    "tflops": row.tflops,
                    "megabytes": row.megabytes,
                    "of_ceiling": row.of_ceiling,
                    "speedup": row.speedup,
                    "baseline": row.against,
                    "at": dict(row.at) or None,
                    "note": row.says or None,
                }
            report.figure(row.way, **values)
        free_memory()


def baseline(ways: Any) -> str:
    """Return the side that speed-ups are over: the compiled definition, else the eager one."""
    return "compile" if "compile" in ways else "eager"


@cache
def device_ceilings(device: str, toy: bool) -> tuple[float, float]:
    """FLOP/s and bytes/s that the device reaches, measured once a process."""
    return (
        (1e12, 1e11)
        if toy
        else ceilings(device, torch.bfloat16 if device == "cuda" else torch.float32)
    )
