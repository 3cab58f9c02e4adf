"""Attention over key blocks that each query selects for itself, dispatched as tokens are to experts.

The pairs (query, selected block) are sorted by block and split into tiles of a few queries that share one key block;
the results of a query's blocks are merged by their log-sum-exps. Cost grows with the number of pairs only.
"""

import torch
from torch import Tensor

TILE = 16
"""Queries of a tile; the last tile of a block is padded."""


def selected_block_attention(
    q: Tensor, k: Tensor, v: Tensor, selected: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend to the selected blocks' keys: output [B, H, T, K] and log-sum-exp [B, H, T], -inf if nothing is selected.

    q [B, H, T, K], already scaled; k and v [B, G, N, b, K]; selected [B, H, T, M] distinct block indices, -1 for none.
    """
    batch, heads, length, width = q.shape
    groups, blocks = k.shape[1:3]
    count = selected.shape[3]
    pair = (selected >= 0).flatten().nonzero()[:, 0]  # flat indices into [B, H, T, M]
    row = pair // count  # flat indices into [B, H, T]
    cell = row // length * blocks + selected.flatten()[pair]  # flat indices into [B, H, N]
    cell, order = cell.sort(stable=True)
    pair, row = pair[order], row[order]
    sizes = cell.bincount(minlength=batch * heads * blocks)
    tiles = -(-sizes // TILE)
    # A pair's slot: the first slot of its block's first tile, plus its index among the pairs of the block.
    inside = torch.arange(len(cell), device=q.device) - (sizes.cumsum(0) - sizes)[cell]
    slot = (tiles.cumsum(0) - tiles)[cell] * TILE + inside
    tile_cell = torch.repeat_interleave(torch.arange(len(tiles), device=q.device), tiles)
    rows = row.new_zeros(len(tile_cell) * TILE).index_copy(0, slot, row)
    group = tile_cell // blocks // heads * groups + tile_cell // blocks % heads // (heads // groups)
    tile_keys = group * blocks + tile_cell % blocks  # flat indices into [B, G, N]
    queries = q.reshape(-1, width).index_select(0, rows).view(-1, TILE, width)
    keys, values = (x.reshape(-1, *x.shape[3:]).index_select(0, tile_keys) for x in (k, v))
    scores = torch.bmm(queries, keys.mT)  # [tiles, Q, b]
    total = scores.logsumexp(-1)
    out = torch.bmm((scores - total[..., None]).exp(), values).flatten(0, 1)
    # Back from slots to pairs; missing pairs get weight zero.
    slot_of_pair = torch.zeros(
        batch * heads * length * count, dtype=torch.long, device=q.device
    ).index_copy(0, pair, slot)
    if not len(slot):
        return torch.zeros_like(q), q.new_full(q.shape[:3], float("-inf"))
    outs = out.index_select(0, slot_of_pair).view(batch, heads, length, count, width)
    sums = total.flatten().index_select(0, slot_of_pair).view(batch, heads, length, count)
    return merge_attentions(outs, sums.masked_fill(selected < 0, float("-inf")))


def merge_attentions(outs: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over M disjoint key sets: outs [..., M, K] and log-sum-exps [..., M] -> [..., K] and [...]."""
    top = sums.amax(-1, keepdim=True).clamp(min=torch.finfo(sums.dtype).min)
    weights = (sums - top).exp()
    total = weights.sum(-1, keepdim=True)
    out = (weights[..., None] * outs).sum(-2) / total.clamp(min=torch.finfo(sums.dtype).tiny)
    return out, (top + total.log())[..., 0]


def own_block_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention of each block to itself: q [B, H, N, b, K], k and v [B, G, N, b, K] -> output, log-sum-exp."""
    batch, heads, blocks, size, width = q.shape
    q = (
        q.view(batch, k.shape[1], -1, blocks, size, width).transpose(2, 3).flatten(3, 4)
    )  # [B, G, N, R*b, K]
    hidden = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    hidden = hidden.repeat(heads // k.shape[1], 1)
    scores = (q @ k.mT).masked_fill(hidden, float("-inf"))
    total = scores.logsumexp(-1)  # [B, G, N, R*b]
    out = (scores - total[..., None]).exp() @ v

    def by_head(x: Tensor) -> Tensor:
        x = x.view(*x.shape[:3], -1, size, *x.shape[4:]).transpose(2, 3)
        return x.reshape(batch, heads, blocks * size, *x.shape[5:])

    return by_head(out), by_head(total)
