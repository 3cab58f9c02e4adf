"""Softmax attention with terms of relative positions, a block of queries at a time.

A block's scores are made of products with slices of the tables of distances, which a strided view shifts to queries
and keys (the skewing of Huang et al. 2019, section 3.4). Backward computes them again from the rows' log-sum-exps, as
in Dao et al. 2022, so no tensor has T x S numbers. Causal blocks need no later keys. Where all distances from some
reach on have one row of a table (Shaw et al. 2018, T5, DeBERTa), the rows are taken relative to that of the farthest
keys before, which changes no weight, so that these keys need no product. Scores are in base 2: on a CPU exp2 takes
half the time of exp, and a sixth where the result is 0.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.ops.relative_spans import RelativeSpan, RelativeSpans, clear_unshifted, shifted
from xscale.nn.eager import eager
from xscale.nn.position.distance_tables import DistanceTables

BLOCK = 128
"""Queries of a block."""
CHUNK = 4096
"""Keys that backward takes at a time, which bounds its buffers; 512 took 1.2 times as long."""
LEAST_SCORES = 1 << 18
"""Pairs of queries and keys from which on attention is by blocks."""
LOG2E = math.log2(math.e)
NAMES = tuple(field.name for field in fields(DistanceTables))


def uses_blocks(q: Tensor, k: Tensor, mask: AttentionMask) -> bool:
    """Return whether `relative_attention` is for queries [B, H, T, K] and keys [B, G, S, K] with this mask.

    It is for self-attention of long sequences on a CPU, in single or double precision. For others all scores are
    computed at once: short ones are as fast and keep their rounding, and there are no fast products in half precision.
    """
    return (
        mask.queries * mask.keys >= LEAST_SCORES
        and mask.offset + mask.queries == mask.keys
        and mask.key_prefix is None
        and q.device.type == "cpu"
        and q.dtype == k.dtype
        and q.dtype in (torch.float32, torch.float64)
    )


@eager
def relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    tables_of: Callable[[Tensor], DistanceTables],
    reach: int | None = None,
    block: int = BLOCK,
) -> Tensor:
    """Attend with terms of distances: q [B, H, T, K], k and v [B, G, S, K] -> [B, H, T, K], without dropout.

    `tables_of` gives the tables' rows for distances [N]. Distances of `reach` and more have equal rows; None: any two
    distances may differ.
    """
    spans = RelativeSpans.of(mask, reach, block)
    tables = vars(tables_of(spans.distances(q.device)))
    rows: dict[str, Tensor | None] = {
        name: None if tables[name] is None else tables[name].to(q.dtype) for name in NAMES
    }
    farthest: dict[str, Tensor] = {}
    if spans.is_clipped:
        for name in ("query_rows", "key_rows", "bias", "value_rows"):
            table = rows[name]
            if table is not None:
                farthest[name] = table[:, :1].clone()
                rows[name] = table - farthest[name]
    if "key_rows" in farthest:
        # Each key has the same term with all queries: k_j f = f k_j, as if f were added to the queries.
        content, term = rows["content_bias"], farthest["key_rows"][:, 0]
        rows["content_bias"] = term if content is None else content + term
    documents = (mask.query_documents, mask.key_documents)
    out: Tensor = _Attend.apply(spans, documents, q, k, v, *(rows[name] for name in NAMES))  # type: ignore[no-untyped-call]
    # The weights of a query sum to 1.
    return out + farthest["value_rows"] if "value_rows" in farthest else out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, spans: RelativeSpans, documents: Any, q: Tensor, k: Tensor, v: Tensor, *rows: Any
    ) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        log_sums = q.new_empty(q.shape[:3])
        work = _Work(spans, documents, q)
        for b, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
            head = _Head(spans, (q, k, v, *rows), b, h, work.buffer)
            for span in spans.query_blocks():
                scores = work.scores(head, span, b)
                top = scores.amax(-1, keepdim=True)
                weights = scores.sub_(top).exp2_()
                total = weights.sum(-1, keepdim=True)
                log_sums[b, h, span.queries] = top.add_(total.log2()).squeeze(-1)
                mixed = torch.mm(weights, head.v[: span.end], out=out[b, h, span.queries])
                if head.value_rows is not None:
                    work.add_value_rows(mixed, weights, head.value_rows, span)
                mixed.div_(total)
        context.save_for_backward(q, k, v, *rows, out, log_sums)
        context.spans, context.documents = spans, documents
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        *inputs, out, log_sums = context.saved_tensors
        spans, q = context.spans, inputs[0]
        work = _Work(spans, context.documents, q)
        gradients = _Gradients(inputs)
        for b, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
            head, slopes = _Head(spans, inputs, b, h, work.buffer), gradients.head(spans, b, h)
            for span in spans.query_blocks():
                above, log_sum = gradient[b, h, span.queries], log_sums[b, h, span.queries, None]
                inner = (above * out[b, h, span.queries]).sum(-1, keepdim=True)
                for chunk in spans.chunks(span, CHUNK):
                    weights = work.scores(head, chunk, b).sub_(log_sum).exp2_()
                    work.add_gradients(slopes, head, chunk, weights, above, inner)
            slopes.finish(head, work)
        return None, None, *gradients.scaled(q.shape[-1] ** -0.5)


Buffer = Callable[[str, int, int], Tensor]
"""Gives the buffer of a name, [rows, columns]."""


def _select(x: Tensor | None, head: int) -> Tensor | None:
    """Return the head's part of [H or 1, ...]."""
    return None if x is None else x[head if x.shape[0] > 1 else 0]


class _Head:
    """Tensors of one head of one sequence; queries, and what else a score is linear in, are scaled to base 2."""

    def __init__(self, spans: RelativeSpans, inputs: Sequence[Any], b: int, h: int, buffer: Buffer) -> None:
        q, k, v, *rows = inputs
        group = h // (q.shape[1] // k.shape[1])
        query_rows, key_rows, bias, value_rows, content_bias, position_bias = (_select(table, h) for table in rows)
        factor = q.shape[-1] ** -0.5 * LOG2E
        self.k, self.v = k[b, group].contiguous(), v[b, group].contiguous()  # [S, K]
        self.q = _scaled(q[b, h], content_bias, factor)  # [T, K]
        self.query_rows, self.value_rows = query_rows, value_rows  # [N, K]
        if query_rows is not None:
            self.position_q = _scaled(q[b, h], position_bias, factor)  # [T, K]
            # [T, 1], terms of each query with keys beyond the reach.
            self.far_queries = (self.position_q @ query_rows[-1])[:, None]
        self.key_rows: Tensor | None = None
        """[N, K], by descending distance."""
        if key_rows is not None:
            self.key_rows = key_rows.flip(0).mul_(factor)
            self.far_keys = self.k @ self.key_rows[0]  # [S], terms of each key, where it is beyond the reach
            self.by_key = torch.mm(self.k, self.key_rows.T, out=buffer("by key", spans.keys, len(key_rows)))  # [S, N]
        self.tile: Tensor | None = None
        """[block, tile_columns], biases of a block's queries and near keys."""
        if bias is not None:
            scaled, columns = bias * LOG2E, spans.tile_columns
            by_distance = scaled[2 : columns + spans.block + 1].expand(spans.block, -1).contiguous()
            self.tile, self.far_bias = shifted(by_distance, columns), scaled[-1]


def _scaled(q: Tensor, bias: Tensor | None, factor: float) -> Tensor:
    return q * factor if bias is None else (q + bias).mul_(factor)


class _Gradients:
    """Gradients of all inputs, up to the factors of `scaled`."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        self.inputs = [
            None if x is None else torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs
        ]

    def head(self, spans: RelativeSpans, b: int, h: int) -> "_HeadGradients":
        """Return views of the gradients of one head of one sequence."""
        q, k, v, *rows = self.inputs
        assert q is not None
        assert k is not None
        assert v is not None
        group = h // (q.shape[1] // k.shape[1])
        return _HeadGradients(spans, q[b, h], k[b, group], v[b, group], *(_select(table, h) for table in rows))

    def scaled(self, scale: float) -> list[Tensor | None]:
        """Return the gradients of the inputs in their order."""
        # The queries of products were scaled to base 2.
        nats = 1 / LOG2E
        factors = dict(
            zip(("q", "k", "v", *NAMES), (scale, nats, 1.0, nats, scale, 1.0, 1.0, scale, scale), strict=True)
        )
        return [
            None if x is None else x.mul_(y) if y != 1 else x
            for x, y in zip(self.inputs, factors.values(), strict=True)
        ]


class _HeadGradients:
    """Views of the gradients of one head."""

    def __init__(
        self,
        spans: RelativeSpans,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_rows: Tensor | None,
        key_rows: Tensor | None,
        bias: Tensor | None,
        value_rows: Tensor | None,
        content_bias: Tensor | None,
        position_bias: Tensor | None,
    ) -> None:
        self.q, self.k, self.v = q, k, v
        self.query_rows, self.value_rows, self.bias = query_rows, value_rows, bias
        self.content_bias, self.position_bias = content_bias, position_bias
        self.key_rows = key_rows
        if bias is not None:
            columns = spans.tile_columns
            self._by_distance = bias.new_zeros(spans.block, columns + spans.block - 1)
            self.tile = shifted(self._by_distance, columns)

    def finish(self, head: _Head, work: "_Work") -> None:
        """Add what is summed over all blocks of the head."""
        if self.key_rows is not None:
            assert head.key_rows is not None
            by_key = head.by_key.masked_fill_(work.unread, 0.0)
            self.k.addmm_(by_key, head.key_rows)
            self.key_rows.add_(torch.mm(by_key.T, head.k).flip(0))
        if self.bias is not None:
            self.bias[2 : self._by_distance.shape[1] + 2].add_(self._by_distance.sum(0))


class _Work:
    """Computes scores and gradients of one block of queries of one head, in buffers that all blocks share."""

    def __init__(self, spans: RelativeSpans, documents: tuple[Tensor | None, Tensor | None], q: Tensor) -> None:
        self.spans, self.documents, self.q = spans, documents, q
        self.buffers: dict[str, Tensor] = {}
        self._unread: Tensor | None = None
        self.future = q.new_full((spans.block, spans.block), float("-inf")).triu_(1)

    def buffer(self, name: str, rows: int, columns: int) -> Tensor:
        """Return the buffer of that name: on a CPU new memory costs as much as a pass over it."""
        if name not in self.buffers or self.buffers[name].numel() < rows * columns:
            self.buffers[name] = self.q.new_empty(rows * columns)
        return self.buffers[name][: rows * columns].view(rows, columns)

    @property
    def unread(self) -> Tensor:
        """Bool [S, N], true where no query is at a distance from a key."""
        if self._unread is None:
            unread = torch.ones(self.spans.keys, len(self.spans.distances(self.q.device)), dtype=torch.bool)
            for span in self.spans.query_blocks():
                self.spans.turned(unread, span).fill_(False)
            self._unread = unread
        return self._unread

    def by_distance(self, x: Tensor, table: Tensor) -> Tensor:
        """x [n, K] times rows of a table [R, K]: [n, R]."""
        return torch.mm(x, table.T, out=self.buffer("by distance", len(x), len(table)))

    def unshifted(self, near: Tensor) -> Tensor:
        """Return values of queries and near keys [n, c] by distance, [n, n + c - 1]; others are 0."""
        rows, columns = near.shape
        by_distance = self.buffer("by distance", rows, rows + columns - 1)
        shifted(by_distance, columns).copy_(near)
        clear_unshifted(by_distance, columns)
        return by_distance

    def scores(self, head: _Head, span: RelativeSpan, b: int) -> Tensor:
        """Return the base-2 scores of a block of queries, [n, end]; -inf where a key is not seen."""
        scores = torch.mm(
            head.q[span.queries], head.k[span.keys].T, out=self.buffer("scores", span.rows, span.end - span.begin)
        )
        near, far = self._zones(scores, span)
        if head.query_rows is not None:
            if span.columns:
                by_distance = self.by_distance(head.position_q[span.queries], head.query_rows[span.distances])
                near.add_(shifted(by_distance, span.columns))
            far.add_(head.far_queries[span.queries])
        if head.key_rows is not None:
            near.add_(self.spans.turned(head.by_key, span))
            far.add_(head.far_keys[span.far : span.end])
        if head.tile is not None:
            if span.columns:
                near.add_(head.tile[self.spans.tile(span)])
            far.add_(head.far_bias)
        first = span.start + self.spans.keys - self.spans.queries
        if self.spans.causal and span.end > first:
            seen = max(first, span.begin)
            scores[:, seen - span.begin :].add_(self.future[: span.rows, seen - first : span.end - first])
        queries, keys = self.documents
        if queries is not None and keys is not None:
            scores.masked_fill_(queries[b, span.queries, None] != keys[b, None, span.keys], float("-inf"))
        return scores

    @staticmethod
    def _zones(scores: Tensor, span: RelativeSpan) -> tuple[Tensor, Tensor]:
        """Views of what has the span's keys as columns: the near ones, and those beyond the reach."""
        return scores[:, span.near - span.begin : span.far - span.begin], scores[:, span.far - span.begin :]

    def add_value_rows(self, mixed: Tensor, weights: Tensor, table: Tensor, span: RelativeSpan) -> None:
        """Add the weights' sum of the table's rows to `mixed` [n, K]."""
        mixed.addmm_(self.unshifted(weights[:, span.near : span.far]), table[span.distances])
        if span.far < span.end:
            mixed.addr_(weights[:, span.far :].sum(1), table[-1])

    def add_gradients(
        self, slopes: _HeadGradients, head: _Head, span: RelativeSpan, weights: Tensor, above: Tensor, inner: Tensor
    ) -> None:
        """Add the gradients of a chunk, given those of the block's output, `above` [n, K], and their products with the
        output, `inner` [n, 1]."""
        slopes.v[span.keys].addmm_(weights.T, above)
        raised = torch.mm(above, head.v[span.keys].T, out=self.buffer("raised", *weights.shape))
        if head.value_rows is not None:
            self._add_value_gradients(slopes, head.value_rows, span, weights, above, raised)
        dscores = raised.sub_(inner).mul_(weights)  # [n, keys]
        dq = torch.mm(dscores, head.k[span.keys])
        slopes.k[span.keys].addmm_(dscores.T, head.q[span.queries])
        if slopes.content_bias is not None:
            slopes.content_bias.add_(dq.sum(0))
        near, far = self._zones(dscores, span)
        if head.query_rows is not None:
            dq.add_(self._query_gradients(slopes, head, span, near, far))
        slopes.q[span.queries].add_(dq)
        if head.key_rows is not None:
            self._add_key_gradients(slopes, head, span, near, far)
        if head.tile is not None:
            assert slopes.bias is not None
            if span.columns:
                slopes.tile[self.spans.tile(span)].add_(near)
            slopes.bias[-1].add_(far.sum())

    def _add_value_gradients(
        self, slopes: _HeadGradients, table: Tensor, span: RelativeSpan, weights: Tensor, above: Tensor, raised: Tensor
    ) -> None:
        """Add the gradient of the values' table, and what it adds to those of the weights, `raised` [n, keys]."""
        assert slopes.value_rows is not None
        (near, far), (near_weights, far_weights) = self._zones(raised, span), self._zones(weights, span)
        if span.columns:
            near.add_(shifted(self.by_distance(above, table[span.distances]), span.columns))
            slopes.value_rows[span.distances].addmm_(self.unshifted(near_weights).T, above)
        if far.shape[1]:
            far.add_((above @ table[-1])[:, None])
            slopes.value_rows[-1].add_(far_weights.sum(1) @ above)

    def _query_gradients(
        self, slopes: _HeadGradients, head: _Head, span: RelativeSpan, near: Tensor, far: Tensor
    ) -> Tensor:
        """Add gradients of the terms of queries and distances, and return that of the queries, [n, K]."""
        assert head.query_rows is not None
        assert slopes.query_rows is not None
        queries = head.position_q[span.queries]
        dq = torch.zeros_like(queries)
        if span.columns:
            by_distance = self.unshifted(near)
            torch.mm(by_distance, head.query_rows[span.distances], out=dq)
            slopes.query_rows[span.distances].addmm_(by_distance.T, queries)
        if far.shape[1]:
            sums = far.sum(1)
            dq.addr_(sums, head.query_rows[-1])
            slopes.query_rows[-1].add_(sums @ queries)
        if slopes.position_bias is not None:
            slopes.position_bias.add_(dq.sum(0))
        return dq

    def _add_key_gradients(
        self, slopes: _HeadGradients, head: _Head, span: RelativeSpan, near: Tensor, far: Tensor
    ) -> None:
        """Put gradients of the terms of keys and distances where the terms were, and add those beyond the reach."""
        assert head.key_rows is not None
        assert slopes.key_rows is not None
        self.spans.turned(head.by_key, span).copy_(near)
        if far.shape[1]:
            sums, keys = far.sum(0), head.k[span.far : span.end]
            slopes.k[span.far : span.end].addr_(sums, head.key_rows[0])
            slopes.key_rows[-1].add_(sums @ keys)
