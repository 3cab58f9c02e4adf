"""State that moves after each optimizer step without a gradient: biases and loads of routers, centroids, statistics."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from xscale.nn.attention.core import Core
from xscale.nn.moe.router.router import Router
from xscale.nn.norm import Norm


@torch.no_grad()
def update_non_gradient_state(
    model: nn.Module,
    means: dict[str, Tensor],
    shard_like: Callable[[Tensor, Tensor], Tensor] = lambda value, parameter: value,
) -> None:
    """Call `update_state` of every router, attention core and norm; after the optimizer step.

    `means` are the statistics of the whole optimizer step over all ranks, the same on every rank.
    `shard_like(full, parameter)` gives a full tensor the layout of a sharded parameter.
    """
    for module in model.modules():
        if isinstance(module, Router):
            module.update_state(means, shard_like)
    for module in model.modules():
        if isinstance(module, Core | Norm):
            module.update_state(means, shard_like)
