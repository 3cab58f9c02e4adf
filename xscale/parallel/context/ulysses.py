"""Ulysses (Jacobs et al. 2023): an all-to-all before attention trades sequence shards for heads, one after it back."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from xscale.mesh.collectives import pad_to_multiple
from xscale.mesh.differentiable_collectives import all_to_all
from xscale.nn.attention.core import Core
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.ops.without_padding import attend_text
from xscale.nn.module import Module, substitute
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens
from xscale.parallel.context.mask import ShardedAttentionMask
from xscale.parallel.context.sequence_sharding import SequenceSharding, TokenShard
from xscale.parallel.roles import seams_in


def unsupported_reason(mixer: Any, cp: int, tp: int) -> str | None:
    """Return why heads cannot be sharded over cp; None when they can."""
    heads, core = mixer.heads, getattr(mixer, "core", None)
    period = 1 if core is None else core.head_period
    if core is not None and any(
        seams_in(core.modules(), Role.NORM_OVER_HEADS, Role.SUM_OVER_HEADS)
    ):
        return "the core reads all heads, of which a rank would have some"
    if heads % (cp * tp * period) == 0:
        return None
    turns = f"; a rank needs a multiple of {period} heads" if period > 1 else ""
    return f"cp x tp = {cp * tp} does not divide heads={heads}{turns}"


def traffic(mixer: Any, cp: int, tp: int, length: int) -> float:
    """Estimate the elements a rank sends in the forward of one sequence: q, k, v and o, except its own shard.

    A mixer that reuses scores has v and o alone.
    """
    sent_heads = 2 * (mixer.heads // tp)
    if hasattr(mixer, "core"):
        sent_heads += 2 * math.lcm(max(1, mixer.kv_heads // tp), cp)
    return float(sent_heads * mixer.head_width * (length / cp) * (cp - 1) / cp)


@dataclass
class Ulysses:
    """A core over a sequence sharded over cp, run on the full sequence with a shard of the heads."""

    core: Core
    running: SequenceSharding | None = field(default=None, init=False)
    """Set while the core runs on this rank's shard of the heads."""

    def __post_init__(self) -> None:
        # The tables that all layers share belong to the stack.
        tables = () if self.core.layer_tables is None else (self.core.layer_tables,)
        for module in dict.fromkeys((*self.core.modules(), *tables)):
            if isinstance(module, Module) and any("heads" in axes for axes in module.axes.values()):
                substitute(module, "param_hook", self._shard_heads(module))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """[B, H, P, K] -> [B, H, P, K]."""
        if not isinstance(mask, ShardedAttentionMask):
            return self.core(q, k, v, mask)  # type: ignore[no-any-return]
        sharding = mask.sharding
        ranks = sharding.count
        heads = q.shape[1] // ranks
        first = sharding.rank * heads
        # With fewer kv_heads than ranks, each is sent to all ranks that need it.
        repeats = math.lcm(k.shape[1], ranks) // k.shape[1]
        k, v = (x if repeats == 1 else x.repeat_interleave(repeats, 1) for x in (k, v))
        length, keys = mask.query_shard.length, mask.key_shard.length
        if length == keys:
            q, k, v = sequence_to_heads(sharding, (q, k, v), length)
        else:
            (q,), (k, v) = (
                sequence_to_heads(sharding, (q,), length),
                sequence_to_heads(sharding, (k, v), keys),
            )
        # The scores that layers hand on stay with the heads: each rank has those of all tokens for its own.
        full = mask.full(
            first,
            heads,
            lambda position, plain: self.core.prefers_relative_bias(position, q, k, plain),
        )
        full_mask = replace(full, score_edge=mask.score_edge)
        self.running, self.core.first_head = sharding, self.core.first_head + first
        try:
            o = attend_text(self.core, q, k, v, full_mask)  # [B, H/R, T, K]
        finally:
            self.running, self.core.first_head = None, self.core.first_head - first
        return heads_to_sequence(sharding, o)

    def _shard_heads(self, module: Module) -> Callable[[Tensor], Tensor]:
        """Return a parameter hook that slices this rank's heads from weights with a `heads` axis."""
        inner = module.param_hook

        def hook(parameter: Tensor) -> Tensor:
            local = parameter if inner is None else inner(parameter)
            name = next(
                name for name, value in module.named_parameters(recurse=False) if value is parameter
            )
            if self.running is None or "heads" not in module.axes[name]:
                return local
            dim = module.axes[name].index("heads")
            size = local.shape[dim] // self.running.count
            return local.narrow(dim, self.running.rank * size, size)

        return hook


@dataclass(frozen=True)
class UlyssesOfReusedScores:
    """Substitute for the `attend` of a mixer that reuses scores, which have a shard of the heads and all tokens."""

    mixer: Any
    inner: Callable[[Tensor, Tokens, Tokens, Any], Tensor]
    """Weights the values of an unsharded sequence."""

    def __call__(self, v: Tensor, tokens: Tokens, key_tokens: Tokens, edge: Any) -> Tensor:
        """[B, H, P, K] -> [B, H, P, K]."""
        if not isinstance(tokens, TokenShard):
            return self.inner(v, tokens, key_tokens, edge)
        assert isinstance(key_tokens, TokenShard), "both sequences are sharded"
        sharding = tokens.sharding
        first = sharding.rank * (v.shape[1] // sharding.count)
        (v,) = sequence_to_heads(sharding, (v,), key_tokens.length)
        self.mixer.first_head += first
        try:
            o = self.inner(v, tokens.full, key_tokens.full, edge)  # [B, H/R, T, K]
        finally:
            self.mixer.first_head -= first
        return heads_to_sequence(sharding, o)


def sequence_to_heads(
    sharding: SequenceSharding, tensors: tuple[Tensor, ...], length: int
) -> tuple[Tensor, ...]:
    """All-to-all of each [B, H, P, K] to [B, H/R, T, K]."""
    ranks = sharding.count
    split = [
        x.reshape(x.shape[0], ranks, -1, *x.shape[2:]).movedim(1, 0) for x in tensors
    ]  # [R, B, H/R, P, K]
    sizes = [x.shape[2] for x in split]
    received = _all_to_all(sharding, split)
    order = sharding.gather_order(length, received.device)
    full = received.movedim(0, 2).flatten(2, 3).index_select(2, order)  # [B, ..., T, K]
    return full.split(sizes, 1)  # type: ignore[no-untyped-call, no-any-return]


def heads_to_sequence(sharding: SequenceSharding, o: Tensor) -> Tensor:
    """All-to-all of [B, H/R, T, K] to [B, H, P, K]."""
    positions = sharding.positions(o.shape[2], o.device)  # [R, P]
    padded = pad_to_multiple(o, 2, 2 * sharding.count).index_select(2, positions.flatten())
    split = padded.view(*padded.shape[:2], *positions.shape, -1).movedim(2, 0)  # [R, B, H/R, P, K]
    return _all_to_all(sharding, [split]).movedim(0, 1).flatten(1, 2)


def _all_to_all(sharding: SequenceSharding, split: list[Tensor]) -> Tensor:
    rows = split[0] if len(split) == 1 else torch.cat(split, 2)
    sizes = [1] * sharding.count
    return all_to_all(rows, sizes, sizes, sharding.group)
