"""Reversible residual blocks (Gomez et al. 2017), as in Reformer (Kitaev et al. 2020, section 3): two residual streams.

Each sublayer f adds to one stream what it makes of the other, Y1 = X1 + Attention(X2) and then Y2 = X2 + FFN(Y1). So
inputs can be computed from outputs, X2 = Y2 - FFN(Y1) and X1 = Y1 - Attention(X2), and need not be saved for backward
(`xscale.parallel.reversible`).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.blocks.block_checks import ADDING
from xscale.nn.depth.edges import hands_on_scores, without_scores
from xscale.nn.mixer.mixer import MIXERS


class Streams(NamedTuple):
    """The two residual streams, [B, T, D] each, in float32 at least: backward subtracts what forward added."""

    first: Tensor
    """The stream to which the next sublayer adds."""
    second: Tensor
    """The stream that the next sublayer reads."""


def upcast_copy(x: Tensor) -> Tensor:
    """Copy [B, T, D] to float32, or to its own type if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)


def check(config: Any, path: str) -> list[Problem]:
    """List what of a stack of reversible blocks, with config `config` at `path`, needs one residual stream."""
    if config.block.residual != "reversible":
        return []
    problems = []
    sequential = take("sequential", key=f"{path}.block.residual")
    two = "reversible blocks have two residual streams"
    if config.block.placement in ("post", "admin", "none"):
        what = f"placement '{config.block.placement}' changes the residual stream, from which inputs are reconstructed"
        problems.append(Problem(f"{path}.block.placement", what, choices=take(*ADDING) + sequential))
    blocks = [config.block_config(layer) for layer in range(config.depth)]
    if any(sublayer.parallel for block in blocks for sublayer in block.listed()):
        what = f"{two}, and parallel sublayers add to one"
        problems.append(Problem(f"{path}.block.sublayers", what, "Or take parallel=false.", choices=sequential))
    if config.block.position is not None:
        what = f"{two}, and a block's position is added to one"
        problems.append(
            Problem(
                f"{path}.block.position",
                what,
                "The model's position is added to both.",
                choices=take(None) + sequential,
            )
        )
    if config.step_signal:
        what = f"{two}, and the signal of a step is added to one"
        problems.append(Problem(f"{path}.step_signal", what, choices=take(False) + sequential))
    if config.exits is not None:
        what = f"{two}, and an exit reads one"
        problems.append(Problem(f"{path}.exits", what, choices=take(None) + sequential))
    if config.halting is not None:
        what = f"{two}, and a token that halts has one output"
        problems.append(Problem(f"{path}.halting", what, "Take null, or block.residual=sequential."))
    kept = "reversible blocks keep nothing for backward, and {} that blocks hand on would be kept"
    if hands_on_scores(config):
        choices = take("sequential") + without_scores(config)
        problems.append(Problem(f"{path}.block.residual", kept.format("scores"), choices=choices))
    value_keys = [key for mixer in config.mixers() if (key := MIXERS.of(mixer).part.values_key(mixer))]
    if value_keys:
        without_values = take(None, key=f"{path}.block.mixer.{value_keys[0]}")
        choices = take("sequential") + without_values
        problems.append(Problem(f"{path}.block.residual", kept.format("values"), choices=choices))
    return problems
