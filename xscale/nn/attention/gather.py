"""Block-sparse attention with torch operators: gather the key blocks that a query block sees, attend within them.

The scores of a chunk of units are alive at a time; backward recomputes them from the rows' log-sums, as in
Dao et al. 2022, so memory grows with the length and not with the number of blocks seen.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xscale.nn.attention.blocks import Bucket, Plan
from xscale.nn.pattern.grid import TokenRule

CHUNK_SCORES = 3 << 16
"""Scores of a chunk: few enough to stay in a CPU's cache from one pass over them to the next."""
CHUNK_SCORES_CUDA = 1 << 27


@dataclass(frozen=True)
class Hidden:
    """What a query may not see inside the blocks it sees."""

    order: Tensor | None = None
    """Bool [Q, b], true where hidden: the causal order inside a unit's last key block, which is its own."""
    tail: int = 0
    """Keys of the last key block that are there; 0: all of them."""
    query_documents: Tensor | None = None
    """[B, rows, Q]."""
    key_documents: Tensor | None = None
    """[B, columns, b]."""
    ways: tuple[tuple[Tensor, TokenRule | None], ...] = ()
    """A key is in sight if any way shows it: the way's layout [H or 1, rows, columns] its block, its rule the token.
    None: the plan's blocks are seen whole."""
    first_query: int = 0
    """Place of the first query, with which rules are asked."""


@dataclass(frozen=True)
class Rule:
    """How scores are made from products."""

    scale: float
    soft_cap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    dropout: float = 0.0
    seed: int = 0
    """Of the dropout."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, hidden: Hidden, rule: Rule, bias: Tensor | None = None
) -> Tensor:
    """q [B, H, rows, Q, K], k and v [B, G, columns, b, K] -> [B, H, rows, Q, K]; a query that sees nothing gets zero.

    `bias` [B or 1, H or 1, rows, Q, columns, b] is added to the scores. A compiler stops here: it would unroll the loop
    over chunks into one graph.
    """
    out: Tensor = _Attend.apply(q, k, v, bias, plan, hidden, rule)  # type: ignore[no-untyped-call]
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, plan: Plan, hidden: Hidden, rule: Rule
    ) -> Tensor:
        work = _Work(q, k, v, bias, plan, hidden, rule)
        out = torch.empty_like(work.q) if plan.full else torch.zeros_like(work.q)
        log_sums = torch.zeros(work.q.shape[:2], dtype=work.wide, device=q.device)  # [B*H*rows, Q]
        for chunk in work.chunks():
            scores = work.scores(chunk, work.gather(work.k, chunk))
            # A row that sees nothing has a maximum of -inf; any finite number in its place gives it weights of zero.
            top = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
            weights = scores.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True)
            total.masked_fill_(total == 0, 1.0)
            log_sums.index_copy_(0, chunk.units, top.add_(total.log()).squeeze(-1))
            kept = work.dropped(weights, chunk)
            mixed = torch.bmm(work.cast(kept), work.gather(work.v, chunk)).div_(total)
            out.index_copy_(0, chunk.units, mixed.to(out.dtype))
        context.save_for_backward(q, k, v, bias, out, log_sums)
        context.rest = (plan, hidden, rule)
        return out.view(q.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        q, k, v, bias, out, log_sums = context.saved_tensors
        work = _Work(q, k, v, bias, *context.rest)
        gradient = gradient.reshape(work.q.shape)
        dq = torch.zeros_like(work.q)
        dk = torch.zeros_like(work.k, dtype=work.wide)
        dv = torch.zeros_like(work.v, dtype=work.wide)
        dbias = torch.zeros_like(bias) if bias is not None and context.needs_input_grad[3] else None
        for chunk in work.chunks():
            above = work.cast(gradient.index_select(0, chunk.units))  # [U, Q, K]
            keys = work.gather(work.k, chunk)  # [U, d*b, K]
            weights, slope = work.weights(chunk, keys, log_sums)  # [U, Q, d*b]
            kept = work.cast(work.dropped(weights, chunk))
            _add_blocks(dv, chunk.keys, torch.bmm(kept.mT, above))
            inner = (above.to(work.wide) * out.index_select(0, chunk.units)).sum(-1, keepdim=True)
            dscores = work.dropped(torch.bmm(above, work.gather(work.v, chunk).mT).to(work.wide), chunk)
            dscores = dscores.sub_(inner).mul_(weights)
            if slope is not None:
                if dbias is not None:
                    work.add_bias(dbias, dscores, chunk)
                dscores = dscores.mul_(slope)
            elif dbias is not None:
                work.add_bias(dbias, dscores, chunk)
            dscores = work.cast(dscores.mul_(work.rule.scale))
            dq.index_copy_(0, chunk.units, torch.bmm(dscores, keys).to(dq.dtype))
            _add_blocks(dk, chunk.keys, torch.bmm(dscores.mT, chunk.queries))
        return dq.view(q.shape), dk.to(k.dtype).view(k.shape), dv.to(v.dtype).view(v.shape), dbias, None, None, None


def _add_blocks(sums: Tensor, blocks: Tensor, parts: Tensor) -> None:
    """Add parts [U, d*b, K] to the `blocks` [U, d] of sums [blocks, b, K]."""
    sums.index_add_(0, blocks.flatten(), parts.view(-1, *sums.shape[1:]).to(sums.dtype))


@dataclass
class _Chunk:
    number: int
    batch: Tensor
    """[U]."""
    heads: Tensor
    """[U]."""
    rows: Tensor
    """[U]."""
    columns: Tensor
    """[U, d]."""
    units: Tensor
    """[U] place among the B*H*rows query blocks."""
    keys: Tensor
    """[U, d] places among the B*G*columns key blocks."""
    queries: Tensor
    """[U, Q, K]."""


class _Work:
    """One call's tensors, flat in their blocks."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, plan: Plan, hidden: Hidden, rule: Rule
    ) -> None:
        self.batch, self.heads = q.shape[:2]
        self.groups, self.block = k.shape[1], k.shape[3]
        self.q, self.k, self.v = (x.reshape(-1, *x.shape[3:]) for x in (q, k, v))
        self.bias, self.plan, self.hidden, self.rule = bias, plan, hidden, rule
        # Half precision: products of a GPU add up in float32 anyway; a CPU has no fast ones, so widen at once.
        half = q.dtype in (torch.bfloat16, torch.float16)
        self.wide = torch.float32 if half else q.dtype
        self.compute = q.dtype if q.is_cuda else self.wide
        self.limit = CHUNK_SCORES_CUDA if q.is_cuda else CHUNK_SCORES

    def cast(self, x: Tensor) -> Tensor:
        return x.to(self.compute)

    def chunks(self) -> Iterator[_Chunk]:
        """The units of each bucket, as many at a time as the limit of scores allows."""
        number = 0
        for bucket in self.plan.buckets:
            heads = self.heads if bucket.heads is None else 1
            units = self.batch * heads * len(bucket.rows)
            size = max(1, self.limit // (self.q.shape[1] * self.block * bucket.degree))
            for first in range(0, units, size):
                yield self._chunk(bucket, heads, first, min(units, first + size), number)
                number += 1

    def _chunk(self, bucket: Bucket, repeats: int, first: int, end: int, number: int) -> _Chunk:
        index = torch.arange(first, end, device=self.q.device)
        unit = index % len(bucket.rows)
        outer = index // len(bucket.rows)
        batch = outer // repeats
        heads = outer % repeats if bucket.heads is None else bucket.heads[unit]
        rows, columns = bucket.rows[unit], bucket.columns[unit]
        units = (batch * self.heads + heads) * self.plan.rows + rows
        groups = batch * self.groups + heads // (self.heads // self.groups)
        keys = groups[:, None] * self.plan.columns + columns
        return _Chunk(
            number, batch, heads, rows, columns, units, keys,
            queries=self.cast(self.q.index_select(0, units)),
        )  # fmt: skip

    def gather(self, x: Tensor, chunk: _Chunk) -> Tensor:
        """The blocks of keys or values that the units see: [U, d*b, K]."""
        return self.cast(x.index_select(0, chunk.keys.flatten())).view(len(chunk.keys), -1, x.shape[-1])

    def scores(self, chunk: _Chunk, keys: Tensor) -> Tensor:
        """[U, Q, d*b], -inf where hidden."""
        return self._hide(self._capped(chunk, keys)[0], chunk)

    def weights(self, chunk: _Chunk, keys: Tensor, log_sums: Tensor) -> tuple[Tensor, Tensor | None]:
        """The attention weights again, and the slope of the soft cap where there is one."""
        scores, slope = self._capped(chunk, keys)
        return self._hide(scores, chunk).sub_(log_sums[chunk.units][..., None]).exp_(), slope

    def _capped(self, chunk: _Chunk, keys: Tensor) -> tuple[Tensor, Tensor | None]:
        scores = torch.bmm(chunk.queries, keys.mT).to(self.wide).mul_(self.rule.scale)
        cap, slope = self.rule.soft_cap, None
        if cap is not None:
            scores = scores.div_(cap).tanh_()
            slope = 1 - scores.square()
            scores = scores.mul_(cap)
        if self.bias is not None:
            scores = scores.add_(self._bias_of(self.bias, chunk))
        return scores, slope

    def _hide(self, scores: Tensor, chunk: _Chunk) -> Tensor:
        hidden = self.hidden
        if hidden.order is not None:
            # The last block of a causal unit is its own.
            scores[..., -self.block :].masked_fill_(hidden.order, float("-inf"))
        if hidden.tail:
            ends = chunk.columns[:, -1] == self.plan.columns - 1  # [U]
            beyond = torch.arange(self.block, device=scores.device) >= hidden.tail  # [b]
            scores[..., -self.block :].masked_fill_(ends[:, None, None] & beyond, float("-inf"))
        if hidden.ways:
            scores.masked_fill_(~self._shown(chunk), float("-inf"))
        if hidden.query_documents is not None:
            assert hidden.key_documents is not None
            here = hidden.query_documents[chunk.batch, chunk.rows]  # [U, Q]
            there = hidden.key_documents[chunk.batch[:, None], chunk.columns].flatten(1)  # [U, d*b]
            scores.masked_fill_(here[:, :, None] != there[:, None, :], float("-inf"))
        return scores

    def _shown(self, chunk: _Chunk) -> Tensor:
        """Bool [U, Q, d*b], true where one of the ways shows the key."""
        size, block, device = self.q.shape[1], self.block, self.q.device
        i = (self.hidden.first_query + chunk.rows[:, None] * size + torch.arange(size, device=device))[:, :, None]
        j = (chunk.columns[:, :, None] * block + torch.arange(block, device=device)).flatten(1)[:, None]
        shown = torch.zeros(len(i), size, j.shape[2], dtype=torch.bool, device=device)
        for layout, rule in self.hidden.ways:
            heads = chunk.heads if layout.shape[0] > 1 else torch.zeros_like(chunk.heads)
            blocks = layout[heads[:, None], chunk.rows[:, None], chunk.columns]  # [U, d]
            seen = blocks.repeat_interleave(block, 1)[:, None]  # [U, 1, d*b]
            shown |= seen if rule is None else seen & rule(i, j)
        return shown

    def _bias_place(self, bias: Tensor, chunk: _Chunk) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        batch = chunk.batch if bias.shape[0] > 1 else torch.zeros_like(chunk.batch)
        heads = chunk.heads if bias.shape[1] > 1 else torch.zeros_like(chunk.heads)
        return batch[:, None], heads[:, None], chunk.rows[:, None], chunk.columns

    def _bias_of(self, bias: Tensor, chunk: _Chunk) -> Tensor:
        batch, heads, rows, columns = self._bias_place(bias, chunk)
        return bias[batch, heads, rows, :, columns].transpose(1, 2).flatten(2).to(self.wide)  # [U, Q, d*b]

    def add_bias(self, sums: Tensor, parts: Tensor, chunk: _Chunk) -> None:
        """Add parts [U, Q, d*b] where `_bias_of` read."""
        batch, heads, rows, columns = self._bias_place(sums, chunk)
        blocks = parts.view(*parts.shape[:2], -1, self.block).transpose(1, 2)  # [U, d, Q, b]
        moved = sums.permute(0, 1, 2, 4, 3, 5)  # [B, H, rows, columns, Q, b]
        moved.index_put_((batch, heads, rows, columns), blocks.to(sums.dtype), accumulate=True)

    def dropped(self, weights: Tensor, chunk: _Chunk) -> Tensor:
        """Weights with some dropped and the rest scaled up, the same ones each time a chunk asks; itself without."""
        if not self.rule.dropout:
            return weights
        generator = torch.Generator(weights.device).manual_seed(self.rule.seed + chunk.number)
        keep = torch.rand(weights.shape, generator=generator, device=weights.device) >= self.rule.dropout
        return (weights * keep).div_(1 - self.rule.dropout)
