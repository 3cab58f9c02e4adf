"""Block-sparse attention with torch operators: gather the key blocks that a query block sees, attend within them.

Only the scores of one chunk of units exist at a time; backward recomputes them from the rows' log-sum-exps, as in
Dao et al. 2022, so memory grows with the length and not with the number of blocks seen. Scores are in base 2, and masks
are added as -inf: on a CPU, exp of -inf takes four times as long as exp2 of it, and a masked fill takes longer than the
matmul that made the scores.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from xscale.nn.attention.ops.bias import Bias, RelativeBias, ScoreBias
from xscale.nn.attention.ops.block_plan import BlockPlan, UnitChunk
from xscale.nn.attention.ops.block_terms import BlockTerms, TermPlaces
from xscale.nn.attention.ops.in_block_mask import InBlockMask
from xscale.nn.compiling.eager import eager
from xscale.nn.random import hash63, hashed_dropout
from xscale_kernels.attention_sinks import BINARY, add_sinks, gradient_of_sinks

CHUNK_SCORES = 3 << 16
"""Scores of a chunk on a CPU: few enough to stay in its cache between passes over them."""
CHUNK_SCORES_CUDA = 1 << 27
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class ScoreOptions:
    """How scores are computed from q k^T."""

    scale: float
    soft_cap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    dropout: float = 0.0
    seed: int = 0
    """Seed of the dropout."""
    first_head: int = 0
    """Index in the model of the first local head, for the dropout."""
    terms: TermPlaces | None = None
    """Terms of a position, beside its tables."""


@eager
def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    block_mask: InBlockMask,
    options: ScoreOptions,
    bias: Tensor | None = None,
    tables: Sequence[Tensor | None] = (),
    sinks: Tensor | None = None,
) -> Tensor:
    """q [B, H, rows, Q, K], k and v [B, G, columns, b, K] -> [B, H, rows, Q, K]; a query that sees nothing gets zero.

    `bias` is added to the scores: [B or 1, H or 1, rows, Q, columns, b], or by relative position, [H, N] as in
    `RelativeBias`. `tables` are those of `options.terms`. `sinks` [H] are logits in the denominators. Not compiled:
    torch.compile would unroll the loop over chunks into one graph.
    """
    out: Tensor = _Attend.apply(q, k, v, bias, sinks, plan, block_mask, options, *tables)  # type: ignore[no-untyped-call]
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        plan: BlockPlan,
        block_mask: InBlockMask,
        options: ScoreOptions,
        *tables: Tensor | None,
    ) -> Tensor:
        work = _Work(q, k, v, bias, plan, block_mask, options, tables)
        out = torch.empty_like(work.q) if plan.full else torch.zeros_like(work.q)
        log_sums = torch.zeros(
            work.q.shape[:2], dtype=work.accumulate_dtype, device=q.device
        )  # [B*H*rows, Q]
        for chunk in work.chunks:
            scores = work.scores(chunk, *work.queries(chunk), work.gather("keys", chunk))[0]
            # A row that sees nothing has a maximum of -inf; replaced by a finite number, it gets weights of zero.
            top = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
            weights = scores.sub_(top).exp2_()
            total = weights.sum(-1, keepdim=True)
            total.masked_fill_(total == 0, 1.0)
            log_sums.index_copy_(0, chunk.units, top.add_(total.log2()).squeeze(-1))
            kept = work.apply_dropout(weights, chunk)
            mixed = work.matmul("mixed", work.cast(kept), work.gather("values", chunk))
            if work.terms is not None and work.terms.adds_values:
                work.terms.add_values(mixed, chunk, kept)
            mixed.div_(total)
            out.index_copy_(0, chunk.units, mixed.to(out.dtype))
        if sinks is not None:
            by_head = q.shape[0], q.shape[1], -1
            out, log_sums = add_sinks(
                out.view(*by_head, q.shape[-1]), log_sums.view(by_head), sinks, BINARY
            )
            out, log_sums = out.view(work.q.shape), log_sums.view(work.q.shape[:2])
        context.save_for_backward(q, k, v, bias, sinks, out, log_sums, *tables)
        context.rest = (plan, block_mask, options)
        return out.view(q.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        q, k, v, bias, sinks, out, log_sums, *tables = context.saved_tensors
        plan, block_mask, options = context.rest
        work = _Work(q, k, v, bias, plan, block_mask, options, tables)
        gradient = gradient.reshape(work.q.shape)
        dq = torch.empty_like(work.q) if work.plan.full else torch.zeros_like(work.q)
        dk = torch.zeros_like(work.k, dtype=work.accumulate_dtype)
        dv = torch.zeros_like(work.v, dtype=work.accumulate_dtype)
        dbias = None
        if bias is not None and context.needs_input_grad[3]:
            dbias = torch.zeros_like(bias, memory_format=torch.contiguous_format)
        for chunk in work.chunks:
            above = work.select("above", gradient, chunk.units)  # [U, Q, K]
            queries, position_queries = work.queries(chunk)  # [U, Q, K]
            keys = work.gather("keys", chunk)  # [U, d*b, K]
            scores, slope = work.scores(chunk, queries, position_queries, keys)
            weights = scores.sub_(log_sums[chunk.units][..., None]).exp2_()
            kept = work.cast(work.apply_dropout(weights, chunk))
            _add_blocks(dv, chunk.keys, work.matmul("parts", kept.mT, above))
            inner = (
                work.select("mixed", out, chunk.units)
                .to(work.accumulate_dtype)
                .mul_(above)
                .sum(-1, keepdim=True)
            )
            raised = work.matmul("raised", above, work.gather("values", chunk).mT)
            if work.terms is not None and work.terms.adds_values:
                work.terms.add_weight_gradients(raised, chunk, kept, above)
            dscores = work.apply_dropout(raised.to(work.accumulate_dtype), chunk)
            dscores = dscores.sub_(inner).mul_(weights)
            if dbias is not None:
                assert work.bias is not None
                work.bias.scatter_add(dbias, dscores, chunk)
            of_scores = work.cast(dscores if slope is None else dscores * slope)
            mixed = work.matmul("mixed", of_scores, keys)
            parts = work.matmul("parts", of_scores.mT, queries)
            if work.terms is not None:
                work.terms.add_gradients(chunk, dscores, position_queries, keys, mixed, parts)
            dq.index_copy_(0, chunk.units, mixed.mul_(work.options.scale).to(dq.dtype))
            _add_blocks(dk, chunk.keys, parts)
        # The queries were scaled to base 2.
        dk.div_(work.power)
        dsinks = None
        if sinks is not None:
            by_head = q.shape[0], q.shape[1], -1
            above, out = (x.view(*by_head, q.shape[-1]) for x in (gradient, out))
            dsinks = gradient_of_sinks(sinks, above, out, log_sums.view(by_head), BINARY)
        of_inputs = (
            dq.view(q.shape),
            dk.to(k.dtype).view(k.shape),
            dv.to(v.dtype).view(v.shape),
            dbias,
            dsinks,
        )
        return *of_inputs, None, None, None, *(() if work.terms is None else work.terms.gradients())


def _add_blocks(sums: Tensor, blocks: Tensor, parts: Tensor) -> None:
    """Scatter-add parts [U, d*b, K] to sums [blocks, b, K] at `blocks` [U * d]."""
    sums.index_add_(0, blocks, parts.view(-1, *sums.shape[1:]).to(sums.dtype))


class _Work:
    """Tensors and chunks of one call, with batch, heads and blocks flattened to one axis."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        plan: BlockPlan,
        block_mask: InBlockMask,
        options: ScoreOptions,
        tables: Sequence[Tensor | None] = (),
    ) -> None:
        batch, heads = q.shape[:2]
        groups, self.block = k.shape[1], k.shape[3]
        self.q, self.k, self.v = (x.reshape(-1, *x.shape[3:]) for x in (q, k, v))
        self.plan = plan
        self.block_mask = block_mask
        self.options = options
        self.bias: Bias | None = None
        if bias is not None:
            line = RelativeBias(bias, q.shape[2], q.shape[3], self.block)
            self.bias = line if bias.ndim == 2 else ScoreBias(bias)
        # Half precision: matmuls of a GPU accumulate in float32 anyway; a CPU has no fast ones, so upcast at once.
        half = q.dtype in (torch.bfloat16, torch.float16)
        self.accumulate_dtype = torch.float32 if half else q.dtype
        self.compute = q.dtype if q.is_cuda else self.accumulate_dtype
        self.plain = options.soft_cap is None and bias is None
        # A bias and a soft cap are in nats, so scores are scaled to base 2 only after them.
        self.power = LOG2E if self.plain else 1.0
        self.terms: BlockTerms | None = None
        if options.terms is not None:
            folds = options.soft_cap is None
            self.terms = BlockTerms(options.terms, tables, options.scale, self.power, folds=folds)
        limit = CHUNK_SCORES_CUDA if q.is_cuda else CHUNK_SCORES
        self.chunks = plan.chunks(
            batch, heads, groups, max(1, limit // (self.q.shape[1] * self.block))
        )
        self.buffers: dict[str, Tensor] = {}
        self.tiles = None if plan.tiles is None else plan.tiles.to(self.accumulate_dtype)

    def cast(self, x: Tensor) -> Tensor:
        return x.to(self.compute)

    def buffer(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the buffer of that name, reused by all chunks: on a CPU new memory costs as much as a pass over it."""
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = torch.empty(size, dtype=self.compute, device=self.q.device)
        return self.buffers[name][:size].view(shape)

    def matmul(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """x @ y [U, M, N] in the buffer of that name."""
        return torch.bmm(x, y, out=self.buffer(name, (*x.shape[:2], y.shape[2])))

    def select(self, name: str, x: Tensor, places: Tensor) -> Tensor:
        """The blocks of x [blocks, b, K] at `places` [U], in the buffer of that name."""
        if x.dtype != self.compute:
            return self.cast(x.index_select(0, places))
        return torch.index_select(x, 0, places, out=self.buffer(name, (len(places), *x.shape[1:])))

    def queries(self, chunk: UnitChunk) -> tuple[Tensor, Tensor]:
        """The units' queries, scaled, that meet keys and that meet the rows of a position: [U, Q, K]."""
        queries = self.select("queries", self.q, chunk.units).mul_(self.options.scale * self.power)
        if self.terms is None:
            return queries, queries
        return self.terms.content_queries(chunk, queries), self.terms.position_queries(
            chunk, queries
        )

    def gather(self, name: Literal["keys", "values"], chunk: UnitChunk) -> Tensor:
        """Gather the blocks of keys or values that the units see: [U, d*b, K]."""
        blocks = self.select(name, self.k if name == "keys" else self.v, chunk.keys)
        return blocks.view(len(chunk.units), -1, blocks.shape[-1])

    def scores(
        self, chunk: UnitChunk, queries: Tensor, position_queries: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Base-2 scores [U, Q, d*b], -inf where masked; and the derivative of the soft cap, if there is one."""
        scores = self.matmul("scores", queries, keys.mT).to(self.accumulate_dtype)
        cap, slope = self.options.soft_cap, None
        if cap is not None:
            scores = scores.div_(cap).tanh_()
            slope = 1 - scores.square()
            scores = scores.mul_(cap)
        if self.bias is not None:
            scores = scores.add_(self.bias.gather(chunk))
        if self.terms is not None:
            self.terms.add_scores(scores, chunk, position_queries, keys)
        if not self.plain:
            scores.mul_(LOG2E)
        self._hide(scores, chunk)
        return scores, slope

    def _hide(self, scores: Tensor, chunk: UnitChunk) -> None:
        block_mask, block = self.block_mask, self.block
        for slot, numbers in chunk.tiles:
            assert self.tiles is not None
            scores[..., slot * block : (slot + 1) * block].add_(self.tiles[numbers])
        if block_mask.causal is not None:
            # The last key block of a causal unit is the query block itself.
            scores[..., -block:].add_(block_mask.causal)
        if block_mask.tail and chunk.ends:
            ends = chunk.columns[:, -1] == self.plan.columns - 1  # [U]
            beyond = torch.arange(block, device=scores.device) >= block_mask.tail  # [b]
            tail = torch.zeros(len(ends), 1, block, dtype=scores.dtype, device=scores.device)
            scores[..., -block:].add_(
                tail.masked_fill_((ends[:, None] & beyond)[:, None], float("-inf"))
            )
        if block_mask.token_masks:
            scores.masked_fill_(~self._shown(chunk), float("-inf"))
        if block_mask.documents is not None:
            block_mask.documents.hide(scores, chunk)

    def _shown(self, chunk: UnitChunk) -> Tensor:
        """Bool [U, Q, d*b], true where any of the token masks shows the key."""
        queries, keys = self._positions(chunk)
        i, j = queries[:, :, None], keys[:, None]
        shown = torch.zeros(len(i), i.shape[1], j.shape[2], dtype=torch.bool, device=self.q.device)
        for layout, options in self.block_mask.token_masks:
            heads = chunk.heads if layout.shape[0] > 1 else torch.zeros_like(chunk.heads)
            blocks = layout[heads[:, None], chunk.rows[:, None], chunk.columns]  # [U, d]
            seen = blocks.repeat_interleave(self.block, 1)[:, None]  # [U, 1, d*b]
            shown |= seen if options is None else seen & options(i, j)
        return shown

    def _positions(self, chunk: UnitChunk) -> tuple[Tensor, Tensor]:
        """Positions of the units' queries [U, Q] and keys [U, d*b]."""
        size = self.q.shape[1]
        block = self.block
        device = self.q.device
        queries = (
            self.block_mask.first_query
            + chunk.rows[:, None] * size
            + torch.arange(size, device=device)
        )
        keys = chunk.columns[:, :, None] * block + torch.arange(block, device=device)
        return queries, keys.flatten(1)

    def apply_dropout(self, weights: Tensor, chunk: UnitChunk) -> Tensor:
        """Apply dropout to the weights: a function of sequence, head, query and key, in whatever chunks they come."""
        if not self.options.dropout:
            return weights
        queries, keys = self._positions(chunk)
        heads = chunk.heads + self.options.first_head
        rows = hash63(self.options.seed, chunk.batch[:, None], heads[:, None], queries)  # [U, Q]
        return hashed_dropout(weights, self.options.dropout, rows, keys)
