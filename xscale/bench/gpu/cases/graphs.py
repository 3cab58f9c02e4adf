"""Job J10: forward and backward of a micro-batch: eager, compiled, and as a CUDA graph."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from xscale.bench.gpu.case import CaseReporter, GpuCase, GpuContext
from xscale.bench.gpu.cases.training import ONE_DOCUMENT
from xscale.bench.gpu.recipes import training_recipe
from xscale.bench.harness.timing import milliseconds_of, time_calls
from xscale.bench.train_sides import collect
from xscale.core.errors import ConfigError
from xscale.mesh.environment import read_rank_info
from xscale.mesh.mesh import leave_process_group
from xscale.run.parts import RunParts
from xscale.train.setup import set_up

MODELS: Mapping[str, tuple[str, ...]] = {
    "dense 1.3B, 4 x 4096 tokens": ("train.batch_size=4",),
    "dense 12 x 768, 1 x 1024 tokens": (
        "model.width=768",
        "model.stack.depth=12",
        "model.stack.block.mixer.heads=12",
        "model.stack.block.ffn.hidden=2048",
        "data.sequence_length=1024",
        "train.batch_size=1",
        "train.micro_batch_size=1",
    ),
}


def cases(context: GpuContext) -> list[GpuCase]:
    """One case for each model."""
    return [GpuCase(name, partial(_run, context, name), seconds=100.0) for name in MODELS]


def _run(context: GpuContext, name: str, report: CaseReporter) -> None:
    sides = {
        "eager": (False, False),
        "compiled": (True, False),
        "eager, CUDA graph": (False, True),
        "compiled, CUDA graph": (True, True),
    }
    for side, (compiled, graph) in sides.items():
        report.measure(side, partial(_measure, context, MODELS[name], compiled, graph))


def _measure(
    context: GpuContext, overrides: Sequence[str], compiled: bool, graph: bool
) -> Mapping[str, Any]:
    if context.device == "cpu" and (compiled or graph):
        raise ConfigError("bench gpu", "CUDA graphs and torch.compile are measured on a GPU alone")
    recipe = training_recipe(
        context,
        "dense_1b",
        [
            *overrides,
            ONE_DOCUMENT,
            f"parallel.compile={str(compiled).lower()}",
            f"parallel.cuda_graphs={str(graph).lower()}",
        ],
    )
    try:
        call = micro_batch(set_up(recipe, read_rank_info()))
        timings = time_calls({"": call}, context.device, context.size(1.0, 0.0))
    finally:
        leave_process_group()
    milliseconds = milliseconds_of(timings, "", context.device)
    tokens = recipe.train.micro_batch_size * recipe.sample_tokens
    fastest = timings.fastest("") * 1e3
    return {
        "milliseconds": milliseconds,
        "fastest_milliseconds": fastest,
        "tokens_per_second": tokens / milliseconds * 1e3,
    }


def micro_batch(parts: RunParts) -> Callable[[], object]:
    """Return a call that computes the gradients of the first micro-batch as training does, and drops them."""
    batches = [batch.to(parts.mesh.device) for batch in collect(parts, 1)[0][:1]]
    targets = float(batches[0].target_count)

    def run() -> None:
        parts.stepper.compute_gradients(batches, targets=targets)
        parts.stepper.discard()

    return run
