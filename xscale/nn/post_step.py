"""State that moves after each optimizer step without a gradient: biases, centroids, statistics, projected vectors."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from xscale.nn.attention.core import Core
from xscale.nn.moe.router.router import Router
from xscale.nn.norm import Norm
from xscale.nn.simplex import Simplex


@torch.no_grad()
def update_non_gradient_state(
    model: nn.Module,
    means: dict[str, Tensor],
    shard_like: Callable[[Tensor, Tensor], Tensor] = lambda value, parameter: value,
    gather_full: Callable[[Tensor], Tensor] = lambda parameter: parameter,
) -> None:
    """Call `update_state` of routers, attention cores and norms, and `project` of simplexes, after an optimizer step.

    `means` are the statistics of the whole optimizer step over all ranks, the same on every rank.
    `shard_like(full, parameter)` gives a full tensor the layout of a sharded parameter; `gather_full(parameter)`
    returns a sharded parameter in full.
    """
    for module in model.modules():
        if isinstance(module, Router):
            module.update_state(means, shard_like)
    for module in model.modules():
        if isinstance(module, Core | Norm):
            module.update_state(means, shard_like)
    for module in model.modules():
        if isinstance(module, Simplex):
            module.project(shard_like, gather_full)
