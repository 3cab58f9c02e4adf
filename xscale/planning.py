"""What a run would be, worked out without running it: `xscale plan`."""

import json
from dataclasses import asdict
from typing import Any

from xscale.core.config import encode
from xscale.measure.flops import size, training_flops
from xscale.measure.memory import at_rest
from xscale.mesh import axes
from xscale.optim.optimizer import OPTIMIZERS
from xscale.parallel import pipeline
from xscale.parallel.plan import DTYPES
from xscale.recipe import Recipe
from xscale.train.setup import build_meta

GIGABYTE = 1e9


def plan(recipe: Recipe, world: int) -> dict[str, Any]:
    """Plain values; the recipe is already checked for that world."""
    degrees = axes.fill(recipe.parallel.mesh, world)
    vocabulary = getattr(recipe.data.tokenizer, "vocabulary", None) or 260
    model = build_meta(recipe, vocabulary)
    counted, length = size(model), recipe.data.sequence_length
    states = OPTIMIZERS.of(recipe.optimizer).traits.states_per_parameter
    memory = at_rest(model, degrees, recipe.parallel.zero.stage, states, DTYPES[recipe.precision.master].itemsize)
    batch, micro = recipe.train.batch_size, recipe.train.micro_batch_size
    micros, pp = batch // (micro * degrees.dp), degrees.pp
    stages = pipeline.estimate(model, recipe.parallel.pipeline, pp, micros, length) if pp > 1 else None
    return {
        "world": world,
        "degrees": asdict(degrees),
        "parameters": counted.parameters,
        "active_parameters": counted.active,
        "vocabulary": vocabulary,
        "flops_per_token": training_flops(model, length, length) / length,
        "tokens_per_step": batch * length,
        "micro_batches_per_rank": micros,
        "pipeline": stages,
        "memory_at_rest_bytes": {**asdict(memory), "total": memory.total},
        "parallel": encode(recipe.parallel),
    }


def show(found: dict[str, Any], *, as_json: bool) -> None:
    """Print what `plan` found."""
    if as_json:
        print(json.dumps(found, indent=2))
        return
    memory = found["memory_at_rest_bytes"]
    degrees = " x ".join(f"{axis} {degree}" for axis, degree in found["degrees"].items() if degree > 1) or "one process"
    active = found["active_parameters"]
    print(
        f"model      {found['parameters']:,} parameters, {active:,} for each token (vocabulary {found['vocabulary']})"
    )
    print(f"compute    {found['flops_per_token'] / 1e6:,.1f} MFLOP for each token, forward and backward")
    print(f"layout     {found['world']} ranks: {degrees}")
    print(
        f"step       {found['tokens_per_step']:,} tokens, {found['micro_batches_per_rank']} micro-batches on each rank"
    )
    if found["pipeline"] is not None:
        stages = found["pipeline"]
        shares = ", ".join(f"{share:.0%}" for share in stages["cost_shares"])
        print(f"pipeline   {stages['schedule']}, stages of {stages['blocks']} blocks ({shares} of the work)")
        print(f"bubble     {stages['bubble']:.1%} of the ranks' time\n{stages['drawing']}")
    parts = ", ".join(f"{name} {size / GIGABYTE:.3f} GB" for name, size in memory.items())
    print(f"at rest    {parts} on each rank; activations come on top")
