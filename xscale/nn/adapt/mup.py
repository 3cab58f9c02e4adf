"""Yang et al. 2022 (Tensor Programs V), table 8 and definition 4.1: maximal update parametrisation (muP).

Hyperparameters that are tuned at a base width hold at others. With m = width / base_width:

- a matrix between hidden states, experts' included, starts with 1/m of the variance that it has at the base width, and
  Adam's learning rate for it is divided by m;
- embeddings, gains and biases start as at the base width, with the learning rate as it is;
- the head's logits are multiplied by 1/m, so that a tied embedding keeps the rule of embeddings;
- a router or classifier, which maps the width to a few experts or classes, starts with 1/m of the standard deviation,
  and its learning rate is divided by m: by lemma J.1 of the paper that is the head's rule without a multiplier;
- attention's scores are multiplied by sqrt(base_head_width) / head_width.

At the base width nothing changes. All widths are meant to grow together, those of heads and feed-forward layers too.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.blocks.stack import Stack
from xscale.nn.ffn.moe.router.router import Router
from xscale.nn.head.class_head import ClassHead
from xscale.nn.head.head import Head, HeadTransform
from xscale.nn.linear import Embedding
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import Mixer
from xscale.nn.model.embed import Embed
from xscale.nn.model.model import MupConfig
from xscale.nn.module import Module, parameter_width_ratios
from xscale.nn.position.position import Position

LISTED = 3
"""Names that a problem lists."""
HIDDEN_AXES = frozenset({"width", "heads", "kv_heads", "ffn", "experts"})
"""Axes of the matrices between hidden states: all but `experts` grow with the width."""


def apply_mup(model: nn.Module, mup: MupConfig, width: int, init_std: float) -> None:
    """Set initialisers, width ratios, the head's multiplier and the factor of the scores of a model on meta."""
    ratio = width / mup.base_width
    depths = {len(stack.blocks) for stack in model.modules() if isinstance(stack, Stack)}
    # Standard deviations that do not depend on a parameter's sizes: those of `Dims.init` and `Dims.residual_init`.
    constants = frozenset(
        round(std, 12) for std in (init_std, *(init_std / (2 * depth) ** 0.5 for depth in depths))
    )
    square, outputs = _maps_of_heads(model)
    for module in model.modules():
        _set_multipliers(module, mup, ratio)
    for module in [module for module in model.modules() if isinstance(module, Module)]:
        for name in module.init:
            is_constant = round(module.init[name].std, 12) in constants
            if name in module.linear_maps:
                if is_constant and (set(module.axes[name]) <= HIDDEN_AXES or module in square):
                    _set_rule(module, name, ratio, ratio**-0.5)
            elif module.decays[name] and (isinstance(module, Router) or module in outputs):
                _set_rule_of_outputs(module, name, ratio, is_constant=is_constant)
            elif not module.decays[name] or _is_vector_like(module, module.axes[name]):
                _set_rule(module, name, 1.0, 1.0)


def _set_multipliers(module: nn.Module, mup: MupConfig, ratio: float) -> None:
    """Set the factor of the logits of a head, and that of the scores of an attention."""
    if isinstance(module, Head) and not isinstance(module, ClassHead):
        module.scale = (1.0 if module.scale is None else module.scale) / ratio
    if isinstance(module, Attention) and mup.base_head_width is not None:
        factor = 1.0 if module.query_factor is None else module.query_factor
        module.query_factor = factor * (mup.base_head_width / module.head_width) ** 0.5


def _set_rule_of_outputs(module: Module, name: str, ratio: float, *, is_constant: bool) -> None:
    """Set the rule of a matrix from the width to a few experts or classes, unless its start depends on the width."""
    if module.axes[name] == ("state", "width") and (
        is_constant or module.init[name].kind == "zeros"
    ):
        _set_rule(module, name, ratio, 1 / ratio)


def _maps_of_heads(model: nn.Module) -> tuple[set[nn.Module], set[nn.Module]]:
    """Return the maps from the width to itself before a head, and those of classifiers to their classes."""
    square: set[nn.Module] = {
        module.dense for module in model.modules() if isinstance(module, HeadTransform)
    }
    heads = [module for module in model.modules() if isinstance(module, ClassHead)]
    square |= {head.dense for head in heads if head.dense is not None}
    return square, {head.classes for head in heads}


def _set_rule(module: Module, name: str, width_ratio: float, std_factor: float) -> None:
    init = module.init[name]
    module.init[name] = replace(init, std=init.std * std_factor)
    module.width_ratios[name] = width_ratio


def _is_vector_like(module: Module, axes: tuple[str, ...]) -> bool:
    """Whether a parameter with weight decay has one axis that grows with the width: a table of rows, or the head."""
    if isinstance(module, Embedding | Embed | Head):
        return axes[-1] == "width"
    return isinstance(module, Position) and axes in (("tokens", "width"), ("state", "heads"))


def check_mup(model: nn.Module, config: Any, path: str) -> list[Problem]:
    """List what of a model on meta, to which `apply_mup` was applied, has no rule; `config` is that of the model."""
    without = take(None, key=f"{path}.mup")
    problems = [
        Problem(f"{path}.{key}", what, choices=take(False) + without)
        for key, what in _SCALINGS.items()
        if getattr(config, key, False)
    ]
    mixers = [
        module
        for module in model.modules()
        if isinstance(module, Mixer) and type(module) is not Attention
    ]
    if mixers:
        what = f"has no rule for the mixer {mixers[0].path} ({type(mixers[0]).__name__})"
        problems.append(
            Problem(f"{path}.mup", what, "Or take the mixer attention.", choices=without)
        )
    unruled = list(_without_rule(model))
    if unruled and not mixers:
        more = f" and {len(unruled) - LISTED} more" if len(unruled) > LISTED else ""
        what = f"has no rule for {', '.join(unruled[:LISTED])}{more}"
        fix = "Or take parts without such parameters (attention, dense, gated, moe)."
        problems.append(Problem(f"{path}.mup", what, fix, choices=without))
    return problems


_SCALINGS = {
    "scale_embeddings": "multiplies embeddings by sqrt(width), and muP keeps their size at all widths",
    "fix_norm": "makes embeddings smaller with the width, and muP keeps their size at all widths",
    "scale_head": "divides the head's input by sqrt(width), and muP by width / base_width",
}


def _without_rule(model: nn.Module) -> Iterator[str]:
    """Full names of the trained parameters that have no width ratio."""
    ratios = parameter_width_ratios(model)
    return (
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in ratios
    )
