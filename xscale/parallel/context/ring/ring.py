"""Ring attention (Liu et al. 2023): keys and values pass round the ring of ranks, with an online softmax over tiles.

Fused kernels attend where only causal order and documents hide keys and no position adds to the scores; all else is
computed in tiles of float32 products. Both are merged by their log-sum-exp, which begins at the logits of the core's
sinks. Backward is a second pass round the ring, in which the gradients of keys and values travel with them. In zig-zag
order each rank has a chunk from the start and one from the end, which balances causal work. A position's terms of
scores and output are computed tile by tile; its parameters do not travel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from xscale.mesh.collectives import RingTransfer, ring_send
from xscale.nn.attention.core import Core
from xscale.nn.attention.ops.dense import upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.compiling.eager import eager
from xscale.nn.position.position import POSITIONS
from xscale.parallel.context.attention import ShardedAttention
from xscale.parallel.context.mask import ShardedAttentionMask
from xscale.parallel.context.ring.flash_parts import FlashParts
from xscale.parallel.context.ring.tile_terms import PositionParameters, TermGradients, TileTerms
from xscale.parallel.context.sequence_sharding import SequenceSharding
from xscale.parallel.recompute.activation_checkpointing import save_output
from xscale_kernels.attention_sinks import gradient_of_sinks

TILE = 512
"""Queries of a tile."""


def unsupported_reason(attention: ShardedAttention, cp: int, tp: int) -> str | None:
    """Return why ring attention cannot be used; None when it can."""
    if attention.dropout:
        return "dropout of attention weights draws the mask of all a head's scores, of which no rank has all"
    if attention.chooses_observed:
        return "each token observes others of its own choice, whose scores only ulysses computes"
    if getattr(attention.core, "soft_cap", None) is not None:
        return "the tiles of the ring do not cap scores"
    position = attention.position
    if (
        position is not None
        and position.adds_scores
        and not POSITIONS.get(str(position.Config.kind)).traits.relative
    ):
        return "the tiles of the ring know distances, and the position's terms of the scores read positions"
    return None


def traffic(attention: ShardedAttention, cp: int, tp: int, length: int) -> float:
    """Estimate the elements a rank sends in the forward of one sequence: k and v of all ranks but the next."""
    kv_heads = max(1, attention.key_channels // attention.head_width // tp)
    return 2 * kv_heads * attention.head_width * (length / cp) * (cp - 1)


@dataclass(frozen=True)
class Ring:
    """A softmax core over a sequence sharded over cp."""

    core: Core

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """[B, H, P, K] -> [B, H, P, K]."""
        if not isinstance(mask, ShardedAttentionMask):
            return self.core(q, k, v, mask)  # type: ignore[no-any-return]
        packed = None not in (mask.query_shard.documents, mask.key_shard.documents)
        attend = _packed_ring_attention if packed else _ring_attention
        return attend(q, k, v, mask, self.core.sink_logits())


def _ring_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: ShardedAttentionMask, sinks: Tensor | None
) -> Tensor:
    """[B, H, P, K] -> [B, H, P, K]; `sinks` [H] are logits in the denominators."""
    # Parameters that all layers share belong to the stack.
    tables = getattr(mask.position, "layer_tables", None)
    parameters = PositionParameters.of((mask.position, tables, *mask.projections))
    ring = FlashParts.of(q, mask) or _RingTiles(mask.sharding, mask, parameters, q.dtype)
    o: Tensor = _RingAttention.apply(q, k, v, sinks, ring, *parameters.used())  # type: ignore[no-untyped-call]
    return o


@eager
def _packed_ring_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: ShardedAttentionMask, sinks: Tensor | None
) -> Tensor:
    """Attend outside compiled graphs, which would hold the documents of one micro-batch. As `_ring_attention`."""
    return _ring_attention(q, k, v, mask, sinks)


@dataclass(frozen=True)
class _Tile:
    """Some queries and some keys of two shards, with their mask and what a position adds."""

    rows: slice
    columns: slice
    visible: Tensor | None
    """Bool [B or 1, 1, T, S]; None: all."""
    terms: TileTerms | None
    """None: the position adds nothing to scores."""

    def scores(self, q: Tensor, k: Tensor, added: Tensor | None) -> Tensor:
        """Return scores [B, G, H/G, T, S] of q [B, G, H/G, T, K] of these rows and k [B, G, S, K] of these columns.

        `added` [B or 1, G, H/G, T, S] is what the position adds to them."""
        scores: Tensor = (q * q.shape[-1] ** -0.5) @ k.mT[:, :, None]
        if added is not None:
            scores = scores + added
        if self.visible is not None:
            scores = scores.masked_fill(~self.visible[:, :, None], float("-inf"))
        return scores


@dataclass(frozen=True)
class _RingTiles:
    """Tiles of a rank's queries against the keys of each rank."""

    sharding: SequenceSharding
    mask: ShardedAttentionMask
    parameters: PositionParameters
    """Those that the position's terms read."""
    dtype: torch.dtype
    """Compute dtype."""

    def merge(
        self, owner: int, out: Tensor, total: Tensor, q: Tensor, kv: Tensor, used: Sequence[Tensor]
    ) -> None:
        """Merge the softmax over `owner`'s keys into that over the keys so far, in place.

        `out` is [B, H, P, K], `total` the log-sum-exp [B, H, P], `kv` [2, B, G, P, K]; `used` are the parameters."""
        out, total, q, (k, v) = (
            _grouped(out, kv),
            _grouped(total, kv),
            upcast(_grouped(q, kv)),
            upcast(kv),
        )
        with self.parameters.replaced(used):
            for tile in self.tiles(owner):
                _merge(out, total, tile, q, k, v)

    def add_gradients(
        self,
        owner: int,
        sums: tuple[Tensor, Tensor],
        inputs: tuple[Tensor, Tensor],
        outputs: tuple[Tensor, Tensor, Tensor],
        terms: TermGradients,
    ) -> None:
        """Add the gradients of q and of `owner`'s kv to `sums`, in place, and those of the parameters to `terms`.

        `inputs` are q and kv; `outputs` the output's gradient, the output and the log-sum-exp."""
        (to_q, to_kv), (q, kv) = sums, inputs
        grad_out, out, total = (upcast(_grouped(x, kv)) for x in outputs)
        dot = (grad_out * out).sum(-1, keepdim=True)  # [B, G, H/G, P, 1]
        q, (k, v) = upcast(_grouped(q, kv)), upcast(kv)
        with self.parameters.replaced(terms.leaves):
            for tile in self.tiles(owner):
                _add_gradients(
                    _grouped(to_q, kv), to_kv, tile, (q, k, v), (grad_out, dot, total), terms
                )

    def tiles(self, owner: int) -> Iterator[_Tile]:
        """Yield the tiles of this rank's queries and `owner`'s keys in which any key is visible."""
        rows, columns = self.mask.query_shard.length, self.mask.key_shard.length
        size, width = self.sharding.chunk_length(rows), self.sharding.chunk_length(columns)
        for query_number, query_chunk in enumerate(self.sharding.rank_chunks(self.sharding.rank)):
            for key_number, key_chunk in enumerate(self.sharding.rank_chunks(owner)):
                if key_chunk * width >= columns or (self.mask.causal and key_chunk > query_chunk):
                    continue
                for first in range(0, size, TILE):
                    count = min(TILE, size - first)
                    local, position = query_number * size + first, query_chunk * size + first
                    # No query sees the keys behind the tile's last one.
                    keys = (
                        min(width, first + count)
                        if self.mask.causal and key_chunk == query_chunk
                        else width
                    )
                    local_keys = slice(key_number * width, key_number * width + keys)
                    key_positions = range(key_chunk * width, key_chunk * width + keys)
                    query_positions = range(position, position + count)
                    yield self._tile(
                        slice(local, local + count), local_keys, query_positions, key_positions
                    )

    def _tile(self, local_rows: slice, local_columns: slice, rows: range, columns: range) -> _Tile:
        """`rows` and `columns` are positions in the full sequence."""
        mask = self.mask
        device = mask.query_shard.ids.device
        keys, queries = (
            torch.arange(span.start, span.stop, device=device) for span in (columns, rows)
        )
        visible = None
        if mask.causal and columns.stop > rows.start:
            visible = (keys[None, :] <= queries[:, None])[None, None]
        elif columns.stop > mask.key_shard.length:
            visible = (keys < mask.key_shard.length)[None, None, None]
        if None not in (mask.query_shard.documents, mask.key_shard.documents):
            documents = _slice(mask.query_shard.full.documents, rows, -1)[:, None, :, None]
            same = documents == _slice(mask.key_shard.full.documents, columns, -1)[:, None, None, :]
            visible = same if visible is None else visible & same
        return _Tile(local_rows, local_columns, visible, self._terms(rows, columns))

    def _terms(self, rows: range, columns: range) -> TileTerms | None:
        mask = self.mask
        if mask.position is None:
            return None
        pairs = mask.pairs
        if pairs is not None:
            causal = mask.causal and columns.stop > rows.start
            offset = rows.start - columns.start
            pairs = replace(
                pairs, queries=len(rows), keys=len(columns), offset=offset, causal=causal
            )
        places = (
            _slice(mask.query_shard.full.positions, rows, 0),
            _slice(mask.key_shard.full.positions, columns, 0),
        )
        return TileTerms(mask.position, pairs, places, self.dtype)


def _slice(full: Tensor | None, positions: range, fill: int) -> Tensor:
    """Slice positions from [B, T], with `fill` after its end."""
    assert full is not None
    missing = max(0, positions.stop - full.shape[1])
    values = full[:, positions.start : positions.stop]
    if not missing:
        return values
    return torch.cat(
        (values, values.new_full((len(values), len(positions) - values.shape[1]), fill)), 1
    )


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        ring: _RingTiles | FlashParts,
        *used: Tensor,
    ) -> Tensor:
        # A recomputation neither attends nor sends again if products are saved.
        out, total = save_output("ring_attention", lambda: _attend(q, k, v, sinks, ring, used))
        o = out.to(q.dtype)
        context.save_for_backward(q, k, v, sinks, out, total, *used)
        context.ring = ring
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        q, k, v, sinks, out, total, *used = context.saved_tensors
        ring: _RingTiles | FlashParts = context.ring
        terms = TermGradients.of(used)
        # Of whole tokens, as the projection of the output gives it: no copy then.
        sharding, grad_out = ring.sharding, gradient.transpose(1, 2).contiguous().transpose(1, 2)
        to_q, kv = (
            torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32)),
            torch.stack((k, v)),
        )
        grads_in_flight: RingTransfer | None = None
        for step in range(sharding.count):
            next_kv = ring_send(kv, sharding.group) if step < sharding.count - 1 else None
            to_kv = torch.zeros_like(kv, dtype=to_q.dtype)
            owner = (sharding.rank - step) % sharding.count
            ring.add_gradients(owner, (to_q, to_kv), (q, kv), (grad_out, out, total), terms)
            grads_in_flight = ring_send(
                to_kv if grads_in_flight is None else to_kv + grads_in_flight.wait(), sharding.group
            )
            kv = kv if next_kv is None else next_kv.wait()
        assert grads_in_flight is not None
        to_k, to_v = grads_in_flight.wait()
        of_used = (
            None if x is None else x.to(leaf.dtype)
            for x, leaf in zip(terms.sums, used, strict=True)
        )
        to_sinks = None if sinks is None else gradient_of_sinks(sinks, grad_out, out, total)
        return to_q.to(q.dtype), to_k.to(k.dtype), to_v.to(v.dtype), to_sinks, None, *of_used


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ring: _RingTiles | FlashParts,
    used: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, P, K], as backward reads it, and the log-sum-exp [B, H, P]."""
    sharding = ring.sharding
    out = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
    total = out.new_full(out.shape[:-1], float("-inf"))
    if sinks is not None:
        total.copy_(sinks[None, :, None])
    kv = torch.stack((k, v))
    for step in range(sharding.count):
        next_kv = ring_send(kv, sharding.group) if step < sharding.count - 1 else None
        ring.merge((sharding.rank - step) % sharding.count, out, total, q, kv, used)
        kv = kv if next_kv is None else next_kv.wait()
    # The fused kernels read the output as it is returned.
    return out.to(q.dtype) if isinstance(ring, FlashParts) else out, total


def _grouped(x: Tensor, kv: Tensor) -> Tensor:
    """View [B, H, ...] as [B, G, H/G, ...], for kv [2, B, G, P, K]."""
    return x.view(x.shape[0], kv.shape[2], -1, *x.shape[2:])


def _merge(out: Tensor, total: Tensor, tile: _Tile, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Merge a tile's softmax into that of the tiles so far, in place."""
    rows = (..., tile.rows, slice(None))
    q, k = q[rows], k[:, :, tile.columns]
    scores = tile.scores(q, k, None if tile.terms is None else tile.terms.scores(q, k))
    before = total[..., tile.rows]
    both = torch.logaddexp(before, scores.logsumexp(-1))
    # A query without a visible key so far has no sum.
    floor = both.masked_fill(both == float("-inf"), 0.0)
    weights = (scores - floor[..., None]).exp()
    mean = weights @ v[:, :, None, tile.columns]
    added = None if tile.terms is None else tile.terms.values(weights)
    mean = mean if added is None else mean + added
    out[rows] = out[rows] * (before - floor).exp()[..., None] + mean
    total[..., tile.rows] = both


def _add_gradients(
    to_q: Tensor,
    to_kv: Tensor,
    tile: _Tile,
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor, Tensor],
    gradients: TermGradients,
) -> None:
    """Add a tile's gradients, in place.

    `inputs` are q, k and v; `outputs` the output's gradient, the sum of its product with the output, the log-sum-exp;
    `gradients` those of the parameters that a position's terms read.
    """
    rows, terms = (..., tile.rows, slice(None)), tile.terms
    q, k, v = inputs[0][rows], inputs[1][:, :, tile.columns], inputs[2][:, :, tile.columns]
    grad_out, dot, total = outputs[0][rows], outputs[1][rows], outputs[2][..., tile.rows, None]
    floor = total.masked_fill(total == float("-inf"), 0.0)
    added = None
    if terms is not None:
        with torch.enable_grad():
            q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
            added = terms.scores(q, k)
    scores = tile.scores(q.detach(), k.detach(), None if added is None else added.detach())
    weights = (scores - floor).exp()  # [B, G, H/G, T, S]
    of_weights = grad_out @ v.mT[:, :, None]
    if terms is not None and terms.position.adds_values:
        with torch.enable_grad():
            read = weights.detach().requires_grad_()
            values = terms.values(read)
        if values is not None:
            of_weights = of_weights + gradients.through(values, grad_out, read)[0]
    slopes = weights * (of_weights - dot)
    if added is not None:
        of_q, of_k = gradients.through(added, slopes, q, k)
        to_q[rows] += of_q
        to_kv[0][:, :, tile.columns] += of_k
    slopes = slopes * q.shape[-1] ** -0.5
    to_q[rows] += slopes @ k.detach()[:, :, None]
    to_kv[0][:, :, tile.columns] += (slopes.mT @ q.detach()).sum(2)
    to_kv[1][:, :, tile.columns] += (weights.mT @ grad_out).sum(2)
