"""block_sparse_attention on the CPU: query blocks with equally many key blocks are batched to fit the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from xscale_kernels.attention_sinks import NATURAL
from xscale_kernels.block_sparse_attention.layout import BlockLayout
from xscale_kernels.block_sparse_attention.op import ScoreModifier
from xscale_kernels.rows import wide

# Scores of one step: 0.5 to 1 MB of float32 was the fastest of 256 KB to 8 MB at T = 4096.
SCORES = 2**18
LSE_UNIT = NATURAL
"""Unit of the log-sum-exp that `forward` returns."""


@dataclass(frozen=True)
class _Rows:
    """A batch of query blocks with equally many key blocks each."""

    groups: slice
    """Slice of the kv heads."""
    heads: slice
    """Slice of the query heads of a kv head."""
    rows: torch.Tensor
    """[r] int64, the query blocks."""
    columns: torch.Tensor
    """[r, n] int64, the key blocks of each."""


def _steps(layout: BlockLayout, batch: int, groups: int, share: int) -> Iterator[_Rows]:
    """Yield all non-empty rows in a fixed order; heads with one shared layout are batched."""
    shared = layout.heads == 1
    tile = layout.block**2 * batch * (groups * share if shared else 1)
    starts, blocks = layout.key_starts.long(), layout.key_blocks.long()
    counts = starts.diff().view(layout.heads, layout.rows)
    for head in range(layout.heads):
        group_slice = slice(None) if shared else slice(head // share, head // share + 1)
        within = slice(None) if shared else slice(head % share, head % share + 1)
        for count in torch.unique(counts[head]).tolist():
            if not count:
                continue
            for rows in (
                (counts[head] == count).nonzero()[:, 0].split(max(1, SCORES // (tile * count)))
            ):
                entries = starts[head * layout.rows + rows, None] + torch.arange(count)
                yield _Rows(group_slice, within, rows, blocks[entries])


def _filled(x: torch.Tensor, more: int, value: float) -> torch.Tensor:
    """Append `more` rows of `value` to x; F.pad would copy even for none."""
    return F.pad(x, (0, 0, 0, more), value=value) if more else x


class _BlockedTensors:
    """The tensors split into blocks, and access to the blocks of one step."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: BlockLayout,
        rule: ScoreModifier,
    ) -> None:
        H, T, G, S = q.shape[1], q.shape[2], k.shape[1], k.shape[2]
        self.layout, self.rule, self.T, self.S, self.G, self.share = layout, rule, T, S, G, H // G
        self.compute = wide(q.dtype)
        # Scale q once instead of every score.
        self.q, self.k, self.v = (
            self.queries(q.to(self.compute) * rule.scale),
            self.keys(k),
            self.keys(v),
        )

    def steps(self) -> Iterator[_Rows]:
        return _steps(self.layout, self.q.shape[0], self.G, self.share)

    def queries(self, x: torch.Tensor, past: float = 0.0) -> torch.Tensor:
        """[B, H, T, K] as [B, G, H / G, R, block, K], padded with `past`."""
        x = _filled(x.to(self.compute), -self.T % self.layout.block, past)
        return x.reshape(
            x.shape[0], self.G, self.share, self.layout.rows, self.layout.block, x.shape[3]
        )

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """[B, G, S, K] as [B, G, C, block, K], padded with zeros."""
        x = _filled(x.to(self.compute), -self.S % self.layout.block, 0.0)
        return x.reshape(x.shape[0], self.G, self.layout.columns, self.layout.block, x.shape[3])

    def take(self, x: torch.Tensor, at: _Rows) -> torch.Tensor:
        """The step's rows of `queries(x)`: [B, g, r, h * block, K]; heads of one kv head form one longer block."""
        return x[:, at.groups, at.heads].index_select(3, at.rows).transpose(2, 3).flatten(3, 4)

    def put(self, x: torch.Tensor, at: _Rows, values: torch.Tensor) -> None:
        """The inverse of `take`, into x."""
        heads = x[:, at.groups, at.heads]
        heads.index_copy_(
            3, at.rows, values.view(*values.shape[:3], -1, *heads.shape[4:]).transpose(2, 3)
        )

    def seen(self, x: torch.Tensor, at: _Rows) -> torch.Tensor:
        """The step's blocks of `keys(x)`: [B, g, r, n * block, K]."""
        blocks = x[:, at.groups].index_select(2, at.columns.flatten())
        return blocks.view(*blocks.shape[:2], at.rows.shape[0], -1, x.shape[4])

    def add(self, x: torch.Tensor, at: _Rows, values: torch.Tensor) -> None:
        """Add [B, g, r, n * block, K] to the blocks that `seen` read; repeated blocks are summed in order."""
        parts = values.view(*values.shape[:2], -1, *x.shape[3:])
        x[:, at.groups].index_add_(2, at.columns.flatten(), parts)

    def positions(self, at: _Rows, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of queries [r, block] and keys [r, (n - first) * block] of a step, from key block `first` on."""
        inside = torch.arange(self.layout.block)
        time = at.rows[:, None] * self.layout.block + inside
        return time, (at.columns[:, first:, None] * self.layout.block + inside).flatten(1)

    def mask_(self, heads: torch.Tensor, at: _Rows) -> None:
        """Mask with -inf in place. heads: [B, g, r, h, block, n * block]."""
        rule, block, shift = self.rule, self.layout.block, self.S - self.T
        # Blocks wholly in the past and inside the sequence need no mask; the others come last, mostly.
        partial = (at.columns + 1) * block > self.S
        if rule.causal:
            partial = partial | ((at.columns + 1) * block - 1 > at.rows[:, None] * block + shift)
        needed = partial.any(0).nonzero()
        if needed.shape[0]:
            first = int(needed[0])
            query_positions, key_positions = self.positions(at, first)
            hidden = (key_positions >= self.S)[:, None, :]
            if rule.causal:
                hidden = hidden | (key_positions[:, None, :] > query_positions[:, :, None] + shift)
            heads[..., first * block :].masked_fill_(hidden[:, None], float("-inf"))
        if rule.query_documents is not None and rule.key_documents is not None:
            query_positions, key_positions = self.positions(at, 0)
            query_ids = F.pad(rule.query_documents, (0, -self.T % block))[:, query_positions]
            key_ids = F.pad(rule.key_documents, (0, -self.S % block))[:, key_positions]
            differs = query_ids[:, :, :, None] != key_ids[:, :, None, :]  # [B, r, block, n * block]
            heads.masked_fill_(differs[:, None, :, None], float("-inf"))

    def scores(
        self, at: _Rows, query: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[B, g, r, h * block, n * block] with -inf where masked, and the soft cap's derivative or None."""
        rule = self.rule
        score = torch.matmul(query, keys.transpose(3, 4))
        bend = None
        if rule.softcap:
            score.div_(rule.softcap).tanh_()
            bend = score.square().neg_().add_(1)
            score.mul_(rule.softcap)
        heads = score.view(*score.shape[:3], -1, self.layout.block, score.shape[4])
        if rule.slopes is not None:
            query_positions, key_positions = self.positions(at, 0)
            distance = (
                query_positions[:, :, None] + (self.S - self.T) - key_positions[:, None, :]
            ).abs_()[:, None]
            slopes = rule.slopes.view(self.G, self.share)[at.groups, at.heads]
            heads.sub_(slopes[:, None, :, None, None] * distance)
        self.mask_(heads, at)
        return score, bend


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: BlockLayout, rule: ScoreModifier
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result [B, H, T, M] and log sum exp of the scores [B, H, T], +inf for a query that sees no key."""
    blocked = _BlockedTensors(q, k, v, layout, rule)
    B, H, T, M = *q.shape[:3], v.shape[3]
    shape = blocked.q.shape[:-1]
    out, lse = blocked.q.new_zeros(*shape, M), blocked.q.new_full((*shape, 1), float("inf"))
    for at in blocked.steps():
        score, _ = blocked.scores(at, blocked.take(blocked.q, at), blocked.seen(blocked.k, at))
        top = score.amax(-1, keepdim=True)
        top.masked_fill_(top == float("-inf"), 0.0)
        weight = score.sub_(top).exp_()
        total = weight.sum(-1, keepdim=True)
        empty = total == 0
        blocked.put(
            out,
            at,
            torch.matmul(weight, blocked.seen(blocked.v, at)).div_(total.masked_fill(empty, 1.0)),
        )
        blocked.put(lse, at, total.log_().add_(top).masked_fill_(empty, float("inf")))
    return out.view(B, H, -1, M)[:, :, :T].to(q.dtype).contiguous(), lse.view(B, H, -1)[
        :, :, :T
    ].contiguous()


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    layout: BlockLayout,
    rule: ScoreModifier,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v."""
    blocked = _BlockedTensors(q, k, v, layout, rule)
    B, H, T, K = q.shape
    # A normaliser of +inf makes the weights of padded queries 0.
    norms = blocked.queries(lse[..., None], past=float("inf"))
    deltas = blocked.queries((dout.to(blocked.compute) * out).sum(-1, keepdim=True))
    douts = blocked.queries(dout)
    dq, dk, dv = (torch.zeros_like(tensor) for tensor in (blocked.q, blocked.k, blocked.v))
    for at in blocked.steps():
        query, keys = blocked.take(blocked.q, at), blocked.seen(blocked.k, at)
        gradient, values = blocked.take(douts, at), blocked.seen(blocked.v, at)
        score, bend = blocked.scores(at, query, keys)
        weight = score.sub_(blocked.take(norms, at)).exp_()
        blocked.add(dv, at, torch.matmul(weight.transpose(3, 4), gradient))
        change = (
            torch.matmul(gradient, values.transpose(3, 4))
            .sub_(blocked.take(deltas, at))
            .mul_(weight)
        )
        if bend is not None:
            change.mul_(bend)
        blocked.put(dq, at, torch.matmul(change, keys))
        blocked.add(dk, at, torch.matmul(change.transpose(3, 4), query))
    return (
        dq.mul_(rule.scale).view(B, H, -1, K)[:, :, :T].to(q.dtype).contiguous(),
        dk.flatten(2, 3)[:, :, : k.shape[2]].to(k.dtype).contiguous(),
        dv.flatten(2, 3)[:, :, : v.shape[2]].to(v.dtype).contiguous(),
    )
