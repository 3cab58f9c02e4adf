"""Liu et al. 2020 (Admin), section 5: initial residual gains from the variance of each sublayer's output.

    omega_i = sqrt(1 + sum_{j < i} Var[f_j(x_{j-1})])

A forward over the run's first batch, with all omegas at 1, measures the variance of each sublayer's output f_j over
tokens and channels. The sum runs over the sublayers before i in the same stack; the 1 is the variance of its input.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from xscale.mesh.collectives import sum_tensor
from xscale.nn.blocks.block import Block
from xscale.nn.blocks.stack import Stack
from xscale.nn.residual.admin import GainedSublayer
from xscale.nn.residual.sublayer import Sublayer
from xscale.objective.objective import Batch, Objective
from xscale.parallel.shard.full_tensors import ShardedWeightWriter
from xscale.parallel.shard.sharded import StagedModel
from xscale.run.parts import RunParts
from xscale.settings.settings import build_on_meta


def init_residual_gains(parts: RunParts) -> list[str]:
    """Set the gains of a run before its first step; return the lines to log, none without gains. Collective."""
    # A stage of a pipeline has only some of the blocks, and the sums run over all of them.
    stacks = gained_sublayers(build_on_meta(parts.settings, parts.corpus.tokenizer.vocabulary))
    if not stacks:
        return []
    batches = (batch for batch, _ in parts.training.evaluation(parts.settings.train.batch_size))
    gains = profile(parts.model, parts.objective, batches, stacks, parts.mesh.device)
    set_gains(parts.model, gains)
    return [
        f"initialised {len(gains)} residual gains by the first batch: {min(gains.values()):.3f} to "
        f"{max(gains.values()):.3f}"
    ]


def gained_sublayers(model: nn.Module) -> list[list[str]]:
    """Return the paths of the sublayers with a residual gain of each stack, in the order of the forward."""
    stacks = []
    for stack in [module for module in model.modules() if isinstance(module, Stack)]:
        blocks = [block for block in stack.blocks.values() if isinstance(block, Block)]
        sublayers = [sublayer for block in blocks for sublayer in block.sublayers().values()]
        stacks.append(
            [sublayer.path for sublayer in sublayers if isinstance(sublayer, GainedSublayer)]
        )
    return [paths for paths in stacks if paths]


@torch.no_grad()
def profile(
    model: nn.Module,
    objective: Objective,
    batches: Iterable[Batch],
    stacks: list[list[str]],
    device: torch.device,
) -> dict[str, float]:
    """Return the gain of each sublayer by its path. Collective; each rank reads as many `batches` of its own."""
    paths = [path for stack in stacks for path in stack]
    # Of each sublayer: elements, their sum and the sum of their squares. Ranks that repeat a sample repeat all three.
    sums = torch.zeros(len(paths), 3, dtype=torch.float64, device=device)
    sublayers = [
        module
        for module in model.modules()
        if isinstance(module, GainedSublayer) and module.path in paths
    ]
    hooks = [
        sublayer.part.register_forward_hook(
            partial(_add_moments, sublayer, sums[paths.index(sublayer.path)])
        )
        for sublayer in sublayers
    ]
    model.eval()
    try:
        # Compiled blocks would be compiled once more, with the hooks.
        with torch.compiler.set_stance("force_eager"):
            for batch in batches:
                objective.loss(model, batch)
            if isinstance(model, StagedModel):
                model.wait_sends()
    finally:
        for hook in hooks:
            hook.remove()
    elements, totals, squares = sum_tensor(sums).cpu().unbind(1)
    variances = dict(
        zip(paths, (squares / elements - (totals / elements).square()).tolist(), strict=True)
    )
    gains = {}
    for stack in stacks:
        variance = 1.0
        for path in stack:
            gains[path] = math.sqrt(variance)
            variance += variances[path]
    return gains


def _add_moments(
    sublayer: Sublayer, sums: Tensor, _: nn.Module, inputs: tuple[Any, ...], y: Tensor
) -> None:
    """Add the number, the sum and the sum of squares of the elements of the output y [B, T, D] to `sums` [3]."""
    tokens = inputs[1]
    # Ones for the tokens of the sequence and zeros for the padding of a shard.
    is_token = sublayer.random.draw(
        lambda shape: y.new_ones(shape), (*y.shape[:2], 1), ("batch", "tokens", "width"), tokens
    )
    y = (sublayer.factor * y.double()) * is_token
    sums += torch.stack((y.shape[2] * is_token.double().sum(), y.sum(), y.square().sum()))


def set_gains(model: nn.Module, gains: dict[str, float]) -> None:
    """Set the gains of this rank's sublayers, each the same over the width."""
    weights = ShardedWeightWriter(model)
    for module in model.modules():
        if isinstance(module, GainedSublayer):
            weight = module.omega.weight
            weights.write(
                weight, torch.full(tuple(weight.shape), gains[module.path], dtype=torch.float64)
            )
