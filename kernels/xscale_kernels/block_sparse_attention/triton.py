"""block_sparse_attention in Triton: FlashAttention (Dao 2023) over lists of blocks; time is proportional to density.

Each list is walked in two loops: blocks that the causal order or the end of the sequence cuts are masked, and whole
ones are not. Rows with long lists start first. The backward is in `gradients.py`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xscale_kernels.attention_sinks import BINARY
from xscale_kernels.block_sparse_attention.gradients import backward
from xscale_kernels.block_sparse_attention.layout import BlockLayout
from xscale_kernels.block_sparse_attention.op import ScoreModifier
from xscale_kernels.block_sparse_attention.tiles import (
    optional_inputs,
    row_span,
    scores,
    settings,
    store_tile,
    tile,
)

__all__ = ["LSE_UNIT", "backward", "forward"]

LSE_UNIT = BINARY
"""Unit of the log-sum-exp that `forward` returns."""


@triton.jit
def _attend(
    count, first, cut, skip, top, total, result, left, query_document, slope, k, v, blocks, key_documents,
    skt, skk, svt, svk, queries, T, S, K, M, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, CAP: tl.constexpr, SLOPED: tl.constexpr, DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_V: tl.constexpr,
):  # fmt: skip
    """Fold `count` entries from `first` on, less those from cut to cut + skip, into the maximum, sum and result."""
    key_document = query_document
    for step in range(count):
        entry = first + step
        if MASKED and DOCUMENTS:
            entry += tl.where(entry >= cut, skip, 0)
        key = tl.load(blocks + entry) * BLOCK
        keys = key + tl.arange(0, BLOCK)
        right = tile(k, skt, skk, key, S, K, BLOCK, BK, not MASKED, EVEN_K)
        product = tl.dot(left, tl.trans(right), input_precision=PRECISION, out_dtype=ACC)
        if DOCUMENTS:
            key_document = tl.load(key_documents + keys, mask=keys < S, other=-2)
        score, _ = scores(
            product, queries[:, None], keys[None, :], query_document[:, None], key_document[None, :], slope,
            T, S, scale, MASKED, True, CAUSAL, CAP, SLOPED, DOCUMENTS,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(score, 1))
        base = higher
        if MASKED:
            # A row that has seen only -inf must not compute -inf - -inf.
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, 1)
        values = tile(v, svt, svk, key, S, M, BLOCK, BV, not MASKED, EVEN_V)
        added = tl.dot(weight.to(values.dtype), values, input_precision=PRECISION, out_dtype=ACC)
        result = result * shrink[:, None] + added
        top = higher
    return top, total, result


@triton.jit
def _forward_kernel(
    q, k, v, out, lse, order, starts, blocks, query_documents, key_documents, query_ranges, key_ranges, slopes,
    sqb, sqh, sqt, sqk, skb, skh, skt, skk, svb, svh, svt, svk,
    B, H, G, T, S, R, K, M, per_head, scale,
    CAUSAL: tl.constexpr, CAP: tl.constexpr, SLOPED: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
    ACC: tl.constexpr, BLOCK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_V: tl.constexpr,
):  # fmt: skip
    batch, head = (
        (tl.program_id(0) % (B * H) // H).to(tl.int64),
        (tl.program_id(0) % H).to(tl.int64),
    )
    row = tl.load(order + per_head * head * R + tl.program_id(0) // (B * H))
    k += batch * skb + head // (H // G) * skh
    v += batch * svb + head // (H // G) * svh
    queries = row * BLOCK + tl.arange(0, BLOCK)
    left = tile(q + batch * sqb + head * sqh, sqt, sqk, row * BLOCK, T, K, BLOCK, BK, False, EVEN_K)
    query_document = tl.zeros((BLOCK,), dtype=tl.int32)
    if DOCUMENTS:
        query_document = tl.load(query_documents + batch * T + queries, mask=queries < T, other=-1)
    slope = tl.load(slopes + head) if SLOPED else 0.0
    top = tl.full((BLOCK,), float("-inf"), dtype=ACC)
    total = tl.zeros((BLOCK,), dtype=ACC)
    result = tl.zeros((BLOCK, BV), dtype=ACC)
    first, full_start, full_end, end = row_span(
        starts, blocks, per_head * head * R + row, row, T, S, query_ranges + 2 * batch * R,
        key_ranges + 2 * batch * tl.cdiv(S, BLOCK), CAUSAL, DOCUMENTS, BLOCK,
    )  # fmt: skip
    top, total, result = _attend(
        full_end - full_start, full_start, 0, 0,
        top, total, result, left, query_document, slope, k, v, blocks, key_documents + batch * S,
        skt, skk, svt, svk, queries, T, S, K, M, scale,
        False, CAUSAL, CAP, SLOPED, DOCUMENTS, PRECISION, ACC, BLOCK, BK, BV, EVEN_K, EVEN_V,
    )  # fmt: skip
    top, total, result = _attend(
        full_start - first + end - full_end, first if DOCUMENTS else full_end, full_start, full_end - full_start,
        top, total, result, left, query_document, slope, k, v, blocks, key_documents + batch * S,
        skt, skk, svt, svk, queries, T, S, K, M, scale,
        True, CAUSAL, CAP, SLOPED, DOCUMENTS, PRECISION, ACC, BLOCK, BK, BV, EVEN_K, EVEN_V,
    )  # fmt: skip
    empty = total == 0
    result /= tl.where(empty, 1.0, total)[:, None]
    query_rows = (batch * H + head) * T + queries
    store_tile(out + (batch * H + head) * T * M, result, row * BLOCK, T, M, BLOCK, BV)
    # +inf makes the backward's weights of an empty row 0.
    tl.store(
        lse + query_rows, tl.where(empty, float("inf"), top + tl.log2(total)), mask=queries < T
    )


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: BlockLayout, rule: ScoreModifier
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result [B, H, T, M] and log2 sum exp2 of the scores [B, H, T], +inf for a query that sees no key."""
    (B, H, T, K), (_, G, S, M) = q.shape, v.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    out, lse = q.new_empty(B, H, T, M), q.new_empty(B, H, T, dtype=compute)
    if out.numel():
        optional = optional_inputs(q, rule, layout.block)
        _forward_kernel[(layout.rows * B * H,)](
            q, k, v, out, lse, layout.row_order, layout.key_starts, layout.key_blocks, *optional,
            *q.stride(), *k.stride(), *v.stride(), B, H, G, T, S, layout.rows, K, M, int(layout.heads > 1), rule.scale,
            **settings(q, v, layout, rule),
        )  # fmt: skip
    return out, lse
