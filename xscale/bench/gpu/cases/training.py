"""Job J2: training steps of a dense model and of mixtures, against plain PyTorch and transformers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xscale.bench.gpu.case import CaseReporter, GpuCase, GpuContext
from xscale.bench.gpu.recipes import FINE, training_recipe
from xscale.bench.gpu.results import PROFILE
from xscale.bench.train import measure_side
from xscale.bench.train_sides import XSCALE, SideBuilder, training_sides
from xscale.recipe import Recipe

STEPS = 6
ONE_DOCUMENT = "data.cross_documents=true"
"""The baselines' attention has no documents: with this xscale's has none either."""
COMPILED = "parallel.compile=true"
MODELS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "dense 1.3B": ("dense_1b", ("train.batch_size=8", ONE_DOCUMENT)),
    "dense 1.3B, packed documents": ("dense_1b", ("train.batch_size=8",)),
    "8 experts, top-2": ("moe_gpu", (ONE_DOCUMENT, COMPILED)),
    "64 experts, top-8": ("moe_gpu", (ONE_DOCUMENT, COMPILED, *FINE)),
}
ORDER = (
    ("dense 1.3B", (XSCALE, "plain PyTorch"), "dense: MFU >= 55 %"),
    (
        "8 experts, top-2",
        (XSCALE, "xscale, balanced", "xscale, dense"),
        "coarse experts: MFU >= 47 %, >= 0.90 of dense",
    ),
    ("64 experts, top-8", (XSCALE, "xscale, balanced"), "fine experts: MFU >= 27 %"),
    ("dense 1.3B, packed documents", (XSCALE,), "dense: MFU >= 55 %"),
    ("8 experts, top-2", ("plain PyTorch", "transformers"), ""),
    ("dense 1.3B", ("transformers", "same modules"), ""),
    ("64 experts, top-8", ("plain PyTorch", "transformers"), ""),
)
"""Models and sides, the figures that matter most first."""


def cases(context: GpuContext) -> list[GpuCase]:
    """The cases in the order of their worth."""
    return [
        GpuCase(
            f"{model}: {', '.join(sides)}",
            _case(context, model, sides),
            seconds=150.0,
            headline=headline,
        )
        for model, sides, headline in ORDER
    ]


def _case(context: GpuContext, model: str, names: Sequence[str]) -> Callable[[CaseReporter], None]:
    def run(report: CaseReporter) -> None:
        recipe = training_recipe(context, *MODELS[model])
        builders = training_sides(recipe)
        for name in names:
            profiled = model == "dense 1.3B" and name == XSCALE
            report_side(report, context, model, name, builders[name], profiled=profiled)

    return run


def report_side(
    report: CaseReporter,
    context: GpuContext,
    model: str,
    name: str,
    build: SideBuilder,
    *,
    profiled: bool = False,
) -> None:
    """Report the row of one side; with `profiled` leave a trace of two steps."""

    def run() -> Mapping[str, Any]:
        profile = context.out / PROFILE if profiled else None
        row = measure_side(build, context.size(STEPS, 1), profile)
        return {
            "case": model,
            "milliseconds": row["step_seconds"] * 1e3,
            "fastest_milliseconds": row["fastest_seconds"] * 1e3,
            **{
                key: row[key]
                for key in ("tokens_per_second", "tflops", "mfu", "mfu_6n", "megabytes", "loss")
            },
            "overload": row["overload"],
            "phases": row["split"] or None,
        }

    report.measure(name, run)


def xscale_side_of(recipe: Recipe) -> SideBuilder:
    """Return the builder of xscale's side alone."""
    return training_sides(recipe)[XSCALE]
