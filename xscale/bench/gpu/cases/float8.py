"""Job J6: training steps of the dense model in bfloat16 and in float8."""

from functools import partial

from xscale.bench.gpu.case import CaseReporter, GpuCase, GpuContext
from xscale.bench.gpu.cases.training import ONE_DOCUMENT, report_side, xscale_side_of
from xscale.bench.gpu.recipes import training_recipe

PRECISIONS = {
    "bfloat16": (),
    "float8, scale of a tensor": ("precision.float8=tensor",),
    "float8, scale of a row": ("precision.float8=row",),
    "float8, scale of a row, torchao": ("precision.float8=row", "precision.float8_kernel=torchao"),
}


def cases(context: GpuContext) -> list[GpuCase]:
    """One case for each precision."""
    return [GpuCase(name, partial(_run, context, name), seconds=120.0) for name in PRECISIONS]


def _run(context: GpuContext, name: str, report: CaseReporter) -> None:
    emulated = ["precision.float8_kernel=emulated"] if context.toy and PRECISIONS[name] else []
    overrides = [*PRECISIONS[name], *emulated, "train.batch_size=8", ONE_DOCUMENT]
    recipe = report.attempt(name, lambda: training_recipe(context, "dense_1b", overrides))
    if recipe is not None:
        report_side(report, context, "dense 1.3B", f"xscale, {name}", xscale_side_of(recipe))
