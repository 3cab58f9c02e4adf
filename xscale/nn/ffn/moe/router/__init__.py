"""Routers: they assign tokens to experts."""

from xscale.nn.ffn.moe.router import (
    base_layer,
    expert_choice,
    group_limited,
    gshard,
    hash,
    noisy_topk,
    prototype,
    random,
    sinkhorn,
    topk,
)

__all__ = [
    "base_layer",
    "expert_choice",
    "group_limited",
    "gshard",
    "hash",
    "noisy_topk",
    "prototype",
    "random",
    "sinkhorn",
    "topk",
]
