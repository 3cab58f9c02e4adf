"""Linear attention over a sharded sequence: each rank starts from the summed states of the ranks before it.

A core whose state is not a sum, as that of the delta rule, starts from the state that the shards before it carry on,
one after the other. The state is of fixed size, so traffic does not grow with the sequence (Sun et al. 2024, LASP).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xscale.mesh.collectives import all_gather
from xscale.nn.attention.core import Core
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.parallel.context.attention import ShardedAttention
from xscale.parallel.context.mask import ShardedAttentionMask
from xscale.parallel.context.sequence_sharding import SequenceSharding
from xscale.parallel.context.state_space import state_before_shard


def unsupported_reason(attention: ShardedAttention, cp: int, tp: int) -> str | None:
    """Return why a state cannot be passed on; None when it can."""
    if not attention.causal:
        return "only causal attention has a state to pass on"
    return attention.core.unsummable_state


def traffic(attention: ShardedAttention, cp: int, tp: int, length: int) -> float:
    """Estimate the elements a rank sends in the forward of one sequence: a state per kv_head, with K features, or a
    transition per head."""
    if size := attention.core.transition_size:
        return attention.query_channels // attention.head_width / tp * size * (cp - 1)
    kv_heads = max(1, attention.key_channels // attention.head_width // tp)
    return kv_heads * attention.head_width * (attention.head_width + 1) * (cp - 1)


@dataclass(frozen=True)
class Scan:
    """A core of linear attention over a sequence sharded over cp."""

    core: Core

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """[B, H, P, K] -> [B, H, P, K]."""
        if not isinstance(mask, ShardedAttentionMask):
            return self.core(q, k, v, mask)  # type: ignore[no-any-return]
        assert mask.query_shard is mask.key_shard, "one sequence"
        shard = mask.query_shard
        sharding, documents = mask.sharding, shard.full.documents
        last, document = None, None
        if documents is not None:
            size = mask.query_shard.ids.shape[1]
            ends = torch.arange(1, sharding.count + 1, device=documents.device) * size - 1
            last = documents.index_select(1, ends.clamp(max=documents.shape[1] - 1))  # [B, R]
            document = last[:, sharding.rank - 1] if sharding.rank else documents[:, 0]
        local_mask = AttentionMask(
            queries=mask.queries,
            keys=mask.keys,
            causal=True,
            query_documents=mask.query_shard.documents,
            key_documents=mask.key_shard.documents,
            prior_state=lambda state: _PriorState.apply(state, last, sharding),  # type: ignore[no-untyped-call]
            carried_state=lambda recurrence: state_before_shard(recurrence, shard),
            prior_document=document,
            device=q.device,
        )
        return self.core(q, k, v, local_mask)  # type: ignore[no-any-return]


class _PriorState(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, state: Tensor, last: Tensor | None, sharding: SequenceSharding
    ) -> Tensor:
        context.sharding, context.included = sharding, _included(last, sharding, state)
        states = all_gather(state[None], 0, sharding.group)  # [R, B, G, F, K]
        return torch.einsum("rb,rbgfk->bgfk", context.included[sharding.rank], states)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        sharding = context.sharding
        gradients = all_gather(gradient[None], 0, sharding.group)
        return (
            torch.einsum("rb,rbgfk->bgfk", context.included[:, sharding.rank], gradients),
            None,
            None,
        )


def _included(last: Tensor | None, sharding: SequenceSharding, like: Tensor) -> Tensor:
    """Return [R, R, B]: 1 where the second rank's state is part of the first one's prior state (the same document)."""
    earlier = torch.ones(sharding.count, sharding.count, dtype=like.dtype, device=like.device).tril(
        -1
    )[..., None]
    if last is None:
        return earlier.expand(-1, -1, len(like))
    ended = last.t()  # [R, B]
    met = torch.cat((ended[:1], ended[:-1]))
    return earlier * (met[:, None] == ended[None])
