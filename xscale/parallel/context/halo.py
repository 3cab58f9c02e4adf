"""Halo exchange for sparse patterns: each rank fetches the key blocks that its queries see in the block layout."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xscale.mesh.differentiable_collectives import all_to_all
from xscale.nn.attention.core import Core
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.parallel.context.attention import ShardedAttention
from xscale.parallel.context.mask import ShardedAttentionMask
from xscale.parallel.context.sequence_sharding import SequenceSharding


def unsupported_reason(attention: ShardedAttention, cp: int, tp: int) -> str | None:
    """Return why halo exchange cannot be used; None when it can."""
    if not attention.causal:
        return "halo exchange needs a causal pattern"
    if attention.core.layout_block is None:
        return "the core has no block layout"
    if attention.position is not None and attention.position.adds_scores:
        return "a position's terms of the scores read the queries and keys of all tokens"
    if attention.dropout:
        return "dropout of attention weights draws the mask of all a head's scores, of which no rank has all"
    return None


def traffic(attention: ShardedAttention, cp: int, tp: int, length: int) -> float:
    """Estimate the mean elements a rank sends in the forward of one sequence: keys and values that others fetch."""
    heads = attention.query_channels // attention.head_width
    kv_heads = max(1, attention.key_channels // attention.head_width // tp)
    needs = needed_key_positions(attention.core, length, heads, -(-length // (2 * cp)) * 2, cp)
    fetched = sum(
        len(positions)
        for rank, owners in enumerate(needs)
        for owner, positions in enumerate(owners)
        if owner != rank
    )
    return 2 * kv_heads * attention.head_width * fetched / cp


def needed_key_positions(
    core: Core, length: int, heads: int, size: int, ranks: int
) -> list[list[list[int]]]:
    """Return [rank][owner] -> key positions that the rank's queries see, relative to the owner's first token."""
    block_layout: NDArray[np.bool_] = np.any(
        core.block_layout(length, heads), axis=0
    )  # [blocks, blocks]
    block = core.layout_block
    assert block is not None
    needs = []
    for rank in range(ranks):
        first, end = min(rank * size, length), min((rank + 1) * size, length)
        visible = (
            block_layout[first // block : -(-end // block)].any(0)
            if end > first
            else np.zeros(len(block_layout), np.bool_)
        )
        positions = np.flatnonzero(visible.repeat(block)[:end])
        needs.append(
            [
                (positions[(positions // size) == owner] - owner * size).tolist()
                for owner in range(ranks)
            ]
        )
    return needs


@dataclass
class Halo:
    """A block-sparse core over a sequence sharded over cp."""

    core: Core
    plans: dict[tuple[int, int], list[list[list[int]]]] = field(default_factory=dict, init=False)
    """(length, heads) -> needed key positions; the four latest are cached."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """[B, H, P, K] -> [B, H, P, K]."""
        if not isinstance(mask, ShardedAttentionMask):
            return self.core(q, k, v, mask)  # type: ignore[no-any-return]
        sharding, length, size = mask.sharding, mask.query_shard.length, q.shape[2]
        rank = sharding.rank
        first, end = min(rank * size, length), min((rank + 1) * size, length)
        needs = self._plan(length, self.core.first_head + q.shape[1], size, sharding.count)
        k, v = _fetch(torch.stack((k, v)), needs, end, sharding)
        if first == end:
            # This rank has only padding; it must still take part in the backward of the exchange, and a learned
            # position and the sinks must have a gradient, which the ranks reduce together.
            positions = mask.query_shard.full.positions[:, :1]
            bias = mask.bias_of(positions, positions)
            sinks = self.core.sink_logits()
            return q * 0 + sum(0 if x is None else x.sum() * 0 for x in (k, v, bias, sinks))
        documents, bias, relative_bias = mask.query_shard.full.documents, None, None
        if mask.position is not None and mask.uses_relative_bias:
            relative_bias = mask.position.relative_bias
        elif mask.position is not None:
            positions = mask.query_shard.full.positions
            bias = mask.bias_of(positions[:, first:end], positions[:, :end])
        local_mask = AttentionMask(
            queries=end - first,
            keys=end,
            causal=True,
            offset=first,
            query_documents=None if documents is None else documents[:, first:end],
            key_documents=None if documents is None else documents[:, :end],
            bias=bias,
            relative_bias=relative_bias,
            device=q.device,
        )
        o: Tensor = self.core(q[:, :, : end - first], k, v, local_mask)
        return torch.nn.functional.pad(o, (0, 0, 0, size - (end - first)))

    def _plan(self, length: int, heads: int, size: int, ranks: int) -> list[list[list[int]]]:
        if (length, heads) not in self.plans:
            if len(self.plans) >= 4:
                del self.plans[next(iter(self.plans))]
            self.plans[length, heads] = needed_key_positions(self.core, length, heads, size, ranks)
        return self.plans[length, heads]


def _fetch(
    local: Tensor, plan: list[list[list[int]]], end: int, sharding: SequenceSharding
) -> tuple[Tensor, Tensor]:
    """Fetch keys and values: [2, B, G, P, K] -> [B, G, end, K] each. Keys out of sight stay zero, unread."""
    rank, size = sharding.rank, local.shape[3]
    sent = [[] if other == rank else plan[other][rank] for other in range(sharding.count)]
    received = [[] if owner == rank else plan[rank][owner] for owner in range(sharding.count)]
    send_index = [position for positions in sent for position in positions]
    recv_index = [
        owner * size + position
        for owner, positions in enumerate(received)
        for position in positions
    ]
    by_position = local.movedim(3, 0)  # [P, 2, B, G, K]
    rows = by_position.index_select(
        0, torch.tensor(send_index, dtype=torch.long, device=local.device)
    )
    sizes = [len(positions) for positions in sent], [len(positions) for positions in received]
    rows = all_to_all(rows, *sizes, sharding.group)
    keys_values = local.new_zeros(max(end, 1), *rows.shape[1:])
    local_length = end - rank * size
    if local_length > 0:
        keys_values = torch.cat((keys_values[: rank * size], by_position[:local_length]))
    index = torch.tensor(recv_index, dtype=torch.long, device=local.device)
    keys, values = keys_values.index_copy(0, index, rows).movedim(0, 3)
    return keys, values
