"""Softmax attention with terms of relative positions, a block of queries at a time.

A block's scores are made of products with slices of the tables of distances, which a strided view shifts to queries
and keys (the skewing of Huang et al. 2019, section 3.4). One buffer has both views, so that scores are not copied from
one to the other; only terms of keys and distances are turned. Backward computes the scores again from the rows'
log-sum-exps, as in Dao et al. 2022, so no tensor has T x S numbers. Causal blocks need no later keys. Where all
distances from some reach on have one row of a table (Shaw et al. 2018, T5, DeBERTa), the rows are taken relative to
that of the farthest keys before, which changes no weight, so that these keys need no product; keys beyond the reach
have one number for each query, and for each key. Scores are in base 2: on a CPU exp2 takes half the time of exp, and a
sixth where the result is 0.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.ops.relative_scores import (
    LOG2E,
    BlockScores,
    HeadGradients,
    HeadInputs,
    select_head,
)
from xscale.nn.attention.ops.relative_spans import (
    RelativeSpans,
)
from xscale.nn.compiling.eager import eager
from xscale.nn.position.distance_tables import DistanceTables

BLOCK = 128
"""Queries of a block."""
CHUNK = 1024
"""Keys that backward takes at a time, which bounds its buffers; all at once is no faster."""
LEAST_SCORES = 1 << 18
"""Pairs of queries and keys from which on attention is by blocks."""
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
        and mask.last_keys is None
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
    for name in ("query_rows", "key_rows", "bias", "value_rows") if spans.is_clipped else ():
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
        context: Any,
        spans: RelativeSpans,
        documents: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *rows: Any,
    ) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        log_sums = q.new_empty(*q.shape[:3], 1)
        tops, totals, zeros = q.new_zeros(3, q.shape[2], 1)
        work = BlockScores(spans, documents, q, spans.keys)
        for b, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
            head = HeadInputs(spans, (q, k, v, *rows), b, h)
            work.multiply_keys(head, slice(0, spans.keys))
            mixed = out[b, h]
            for span in work.chunks[0][1]:
                queries = span.queries
                weights = work.scores(head, span, b, zeros[queries])
                torch.amax(weights.scores, -1, keepdim=True, out=tops[queries])
                torch.sum(
                    weights.scores.sub_(tops[queries]).exp2_(),
                    -1,
                    keepdim=True,
                    out=totals[queries],
                )
                torch.mm(weights.scores, head.v[: span.end], out=mixed[queries])
                if head.value_rows is not None:
                    work.add_value_rows(mixed[queries], weights, head.value_rows, span)
            mixed.div_(totals)
            torch.add(tops, totals.log2_(), out=log_sums[b, h])
        context.save_for_backward(q, k, v, *rows, out, log_sums)
        context.spans, context.documents = spans, documents
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        *inputs, out, log_sums = context.saved_tensors
        spans, q = context.spans, inputs[0]
        work = BlockScores(spans, context.documents, q, CHUNK)
        gradients = _Gradients(inputs)
        for b, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
            head, slopes = HeadInputs(spans, inputs, b, h), gradients.head(spans, b, h)
            inner = (gradient[b, h] * out[b, h]).sum(-1, keepdim=True).neg_()
            start = -log_sums[b, h]
            for keys, blocks in work.chunks:
                work.multiply_keys(head, keys)
                for span in blocks:
                    queries = span.queries
                    weights = work.scores(head, span, b, start[queries])
                    weights.scores.exp2_()
                    work.add_gradients(
                        slopes, head, span, weights, gradient[b, h, queries], inner[queries]
                    )
                work.add_products_of_keys(slopes, head, keys)
            slopes.finish(head, gradient[b, h])
        return None, None, *gradients.scaled(q.shape[-1] ** -0.5)


class _Gradients:
    """Gradients of all inputs, up to the factors of `scaled`."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        self.inputs = [
            None if x is None else torch.zeros_like(x, memory_format=torch.contiguous_format)
            for x in inputs
        ]

    def head(self, spans: RelativeSpans, b: int, h: int) -> "HeadGradients":
        """Return views of the gradients of one head of one sequence."""
        q, k, v, *rows = self.inputs
        assert q is not None
        assert k is not None
        assert v is not None
        group = h // (q.shape[1] // k.shape[1])
        return HeadGradients(
            spans, q[b, h], k[b, group], v[b, group], *(select_head(table, h) for table in rows)
        )

    def scaled(self, scale: float) -> list[Tensor | None]:
        """Return the gradients of the inputs in their order."""
        # The queries of products were scaled to base 2.
        nats = 1 / LOG2E
        factors = (
            scale,
            nats,
            1.0,
            nats,
            scale,
            1.0,
            1.0,
            scale,
            scale,
        )  # of q, k, v and what NAMES has
        return [
            None if x is None else x.mul_(y) if y != 1 else x
            for x, y in zip(self.inputs, factors, strict=True)
        ]
