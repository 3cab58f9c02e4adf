"""Attention inside buckets: a query sees the nearest keys of a bucket (hash bucket or cluster).

Kitaev et al. 2020 sort by bucket, split into chunks, and let a chunk see itself and the one before. There a later token
moves the chunk boundaries, and so changes what an earlier token sees. Here a token sees the last `window` tokens of its
bucket (and the next ones in bidirectional models): the same cost, and causal. `bucketed_attention` has one bucket for a
token's query and key; with `BucketTiles` they have a bucket each, and a query sees the keys of its own.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.nn.attention.ops.chunks import split_chunks, with_neighbour_chunks
from xscale.nn.attention.ops.dense import masked_softmax
from xscale.nn.attention.ops.mask import AttentionMask


def bucketed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    labels: Tensor,
    window: int,
    mask: AttentionMask,
    avoid_self: bool,
) -> Tensor:
    """q, k, v [B, H, S, K] of one sequence, bucket labels [R, B, H, S] of R hashes -> [B, H, S, K].

    A key that is visible in several rounds counts once. `avoid_self`: a token attends to itself only if it has no other
    key. Scores are q . k, without a scale.
    """
    if mask.key_documents is not None:
        labels = labels + mask.key_documents[:, None].to(labels.dtype) * (int(labels.max()) + 1)
    orders = labels.argsort(dim=-1, stable=True)  # [R, B, H, S]
    places = orders.argsort(-1)
    outs, sums = [], []
    for at, sorted_position in enumerate(places):
        out, total = _round(
            q, k, v, orders[at], labels, places, at, window, mask.causal, avoid_self
        )
        outs.append(out.gather(2, sorted_position[..., None].expand_as(out)))
        sums.append(total.gather(2, sorted_position))
    if len(outs) == 1:
        return outs[0]
    weights = torch.stack(sums).softmax(0)  # [R, B, H, S]
    return (torch.stack(outs) * weights[..., None]).sum(0)


def _round(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: Tensor,
    labels: Tensor,
    places: Tensor,
    at: int,
    window: int,
    causal: bool,
    avoid_self: bool,
) -> tuple[Tensor, Tensor]:
    """Round `at` in sorted order: outputs [B, H, S, K] and log-sum-exps of the scores [B, H, S]."""
    length = order.shape[-1]
    q, k, v = (
        split_chunks(x.gather(2, order[..., None].expand_as(x)), 2, window) for x in (q, k, v)
    )
    k, v = (with_neighbour_chunks(x, 2, not causal) for x in (k, v))  # [B, H, N, W, K]
    scores = q @ k.mT  # [B, H, N, C, W]
    expanded_order = order.expand_as(labels)
    label, sorted_position = (
        split_chunks(x.gather(-1, expanded_order), 3, window, -2) for x in (labels, places)
    )  # [R, B, H, N, C]
    distance = (
        sorted_position[..., :, None]
        - with_neighbour_chunks(sorted_position, 3, not causal, -1)[..., None, :]
    )
    near = (distance < window) & ((distance >= 0) if causal else (distance > -window))
    near &= label[..., :, None] == with_neighbour_chunks(label, 3, not causal, -1)[..., None, :]
    # A key that is visible in several rounds gets the weight of one round in total.
    scores = scores - near.sum(0).clamp(min=1).to(scores.dtype).log()
    if avoid_self:
        scores = scores.masked_fill(distance[at] == 0, -1e5)
    scores = scores.masked_fill(~near[at], torch.finfo(scores.dtype).min)
    total = scores.logsumexp(-1)
    out = (scores - total[..., None]).exp() @ v
    return out.flatten(2, 3)[:, :, :length], total.flatten(2, 3)[:, :, :length]


SELF_SCORE = -1e5
"""Score of a token with itself: a token attends to itself only if it has no other key."""


def chunked_hash_attention(
    q: Tensor, k: Tensor, v: Tensor, labels: Tensor, size: int, mask: AttentionMask
) -> Tensor:
    """q, k, v [B, H, S, K] of one sequence, buckets [R, B, H, S] of R hashes -> [B, H, S, K]; scores are q . k.

    LSH attention in chunks (Kitaev et al. 2020, section 2): tokens sorted by bucket; a chunk sees itself and the last.
    As in the authors' code, the chunks of all hash rounds form one ring: the first chunk of a round sees the last chunk
    of the round before. A chunk may contain several buckets, which then see each other, and a key that is visible in
    several rounds counts in each. A later token moves the chunk boundaries, so this is for bidirectional models only.
    """
    assert not mask.causal
    rounds, length = labels.shape[0], q.shape[2]
    size = min(size, length)
    documents = mask.key_documents
    if documents is not None:
        labels = labels + documents[:, None].to(labels.dtype) * (int(labels.max()) + 1)
    orders = labels.argsort(dim=-1, stable=True).movedim(0, 2)  # [B, H, R, S]

    def ring(x: Tensor, value: int = 0) -> Tensor:
        """[B, H, R, S, ...] -> [B, H, R * N, C, ...]."""
        return split_chunks(x, 3, size, value).flatten(2, 3)

    def sorted_(x: Tensor) -> Tensor:
        flat = x.gather(2, orders.flatten(2)[..., None].expand(-1, -1, -1, x.shape[3]))
        return ring(flat.view(*orders.shape, -1))

    positions = ring(orders, -1)  # [B, H, M, C], -1 where a chunk is filled up
    key_positions = _before(positions, length > size)
    scores = sorted_(q) @ _before(sorted_(k), length > size).mT  # [B, H, M, C, W]
    scores = scores.masked_fill(positions[..., :, None] == key_positions[..., None, :], SELF_SCORE)
    hidden = (key_positions < 0)[..., None, :]
    if documents is not None:
        query_document, key_document = (
            documents[:, None]
            .expand(-1, q.shape[1], -1)
            .gather(2, x.clamp(min=0).flatten(2))
            .view_as(x)
            for x in (positions, key_positions)
        )
        hidden = hidden | (query_document[..., :, None] != key_document[..., None, :])
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    total = scores.logsumexp(-1, keepdim=True)
    out = (scores - total).exp() @ _before(sorted_(v), length > size)
    # Back to the sequence's order in each round; rounds are weighted by the sums of their weights.
    back = orders.argsort(-1)[..., None]  # [B, H, R, S, 1]
    out, total = (
        x.view(*x.shape[:2], rounds, -1, x.shape[-1])[:, :, :, :length] for x in (out, total)
    )
    out, total = out.gather(3, back.expand_as(out)), total.gather(3, back)
    return (out * F.softmax(total, 2)).sum(2)


def _before(x: Tensor, several: bool) -> Tensor:
    """Concatenate each chunk [B, H, M, C, ...] with the one before it in the ring; a single chunk stays as it is."""
    return torch.cat((x.roll(1, 2), x), 3) if several else x


@dataclass(frozen=True)
class BucketTiles:
    """Queries and keys with a bucket each: a query sees the keys of its own bucket that are nearest to its position.

    These are the last `window` keys at or before the query, and in bidirectional models the next `window - 1`. Keys are
    sorted by bucket and split into chunks of `window`; queries are grouped into tiles of C that need the same chunks,
    W keys. A tile may be partly empty, so M tiles hold up to half as many queries more than there are. What a query
    sees depends on no later token and on no other query.
    """

    slots: Tensor
    """[B, H, T], place of each query among the M * C places of the tiles."""
    queries_per_tile: int
    """C."""
    key_index: Tensor
    """[B, H, M, W], positions of the keys that a tile needs."""
    visible: Tensor
    """Bool [B, H, M, C, W]."""
    is_self: Tensor
    """Bool [B, H, M, C, W]: query and key are the same token."""

    def queries(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Put queries [B, H, T, K] into the tiles [B, H, M, C, K]; empty places get `value`."""
        tiles = x.new_full(
            (*x.shape[:2], self.visible.shape[2] * self.queries_per_tile, x.shape[3]), value
        )
        tiles = tiles.scatter(2, self.slots[..., None].expand_as(x), x)
        return tiles.view(*x.shape[:2], -1, self.queries_per_tile, x.shape[3])

    def keys(self, x: Tensor) -> Tensor:
        """Take the keys or values [B, H, S, K] of each tile: [B, H, M, W, K]."""
        flat = x.gather(2, self.key_index.flatten(2)[..., None].expand(-1, -1, -1, x.shape[3]))
        return flat.view(*self.key_index.shape, x.shape[3])

    def to_sequence(self, x: Tensor) -> Tensor:
        """Take what the tiles [B, H, M, C, K] hold for each query: [B, H, T, K]."""
        return x.flatten(2, 3).gather(2, self.slots[..., None].expand(-1, -1, -1, x.shape[4]))


def tile_places(queries: int, keys: int, window: int) -> int:
    """Return the places for queries in all tiles, M * C."""
    window = min(window, keys)
    per_tile, chunks = -(-window // 2), min(-(-keys // window), queries)
    return (chunks + (queries - chunks) // per_tile) * per_tile


def _buckets_of_documents(
    query_buckets: Tensor, key_buckets: Tensor, mask: AttentionMask
) -> tuple[Tensor, Tensor]:
    """Number the buckets so that each document has buckets of its own."""
    if mask.key_documents is None:
        return query_buckets, key_buckets
    assert mask.query_documents is not None
    count = int(torch.maximum(query_buckets.max(), key_buckets.max())) + 1
    queries = query_buckets + mask.query_documents[:, None].to(query_buckets.dtype) * count
    return queries, key_buckets + mask.key_documents[:, None].to(key_buckets.dtype) * count


def tile_buckets(
    query_buckets: Tensor, key_buckets: Tensor, window: int, mask: AttentionMask
) -> BucketTiles:
    """Arrange queries with buckets [B, H, T] and keys with buckets [B, H, S], which documents keep apart."""
    query_buckets, key_buckets = _buckets_of_documents(query_buckets, key_buckets, mask)
    length, device = mask.keys, key_buckets.device
    window = min(window, length)
    per_tile = -(-window // 2)
    order = key_buckets.argsort(dim=-1, stable=True)  # [B, H, S]
    sorted_buckets = key_buckets.gather(-1, order)
    positions = torch.arange(mask.offset, mask.offset + mask.queries, device=device).expand_as(
        query_buckets
    )
    # The last key in sorted order that has the query's bucket and does not come after it.
    last_key = (
        torch.searchsorted(
            sorted_buckets * length + order, query_buckets * length + positions, right=True
        )
        - 1
    )
    chunks = -(-length // window)
    chunk = last_key.clamp(min=0) // window  # [B, H, T]
    counts = chunk.new_zeros(*chunk.shape[:2], chunks).scatter_add(2, chunk, torch.ones_like(chunk))
    last_tiles = (-(-counts // per_tile)).cumsum(-1)  # [B, H, N], ends of the chunks' tiles
    first_tiles = last_tiles + counts // -per_tile
    in_chunk = chunk.argsort(dim=-1, stable=True).argsort(-1) - (counts.cumsum(-1) - counts).gather(
        2, chunk
    )
    slots = first_tiles.gather(2, chunk) * per_tile + in_chunk
    tiles = tile_places(mask.queries, length, window) // per_tile
    numbers = torch.arange(tiles, device=device).expand(*chunk.shape[:2], tiles).contiguous()
    tile_chunk = torch.searchsorted(last_tiles, numbers, right=True).clamp(
        max=chunks - 1
    )  # [B, H, M]
    neighbours = torch.arange(-window, window if mask.causal else 2 * window, device=device)
    key_place = tile_chunk[..., None] * window + neighbours  # [B, H, M, W]
    inside = (key_place >= 0) & (key_place < length)
    clamped = key_place.clamp(0, length - 1).flatten(2)
    key_index = order.gather(-1, clamped).view_as(key_place)
    key_bucket = sorted_buckets.gather(-1, clamped).view_as(key_place)

    def tiled(x: Tensor) -> Tensor:
        filled = x.new_full((*x.shape[:2], tiles * per_tile), -1).scatter(2, slots, x)
        return filled.view(*x.shape[:2], tiles, per_tile, 1)

    distance = tiled(last_key) - key_place[..., None, :]  # [B, H, M, C, W]
    visible = (
        (distance < window)
        & ((distance >= 0) if mask.causal else (distance > -window))
        & inside[..., None, :]
    )
    visible &= tiled(query_buckets) == key_bucket[..., None, :]
    return BucketTiles(
        slots, per_tile, key_index, visible, tiled(positions) == key_index[..., None, :]
    )


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, tiles: BucketTiles, avoid_self: bool
) -> Tensor:
    """Softmax over the keys that `tiles` shows: q [B, H, T, K], k and v [B, H, S, K] -> [B, H, T, K].

    Scores are q . k, without a scale. `avoid_self`: a token attends to itself only if it sees no other key. A query
    that sees no key gets zero.
    """
    scores = tiles.queries(q) @ tiles.keys(k).mT  # [B, H, M, C, W]
    if avoid_self:
        scores = scores.masked_fill(tiles.is_self, SELF_SCORE)
    weights = masked_softmax(scores, ~tiles.visible)
    return tiles.to_sequence(weights @ tiles.keys(v))
