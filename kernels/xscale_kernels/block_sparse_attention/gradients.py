"""The backward of block_sparse_attention in Triton: one kernel from the queries' side, one from the keys'.

Long columns are split into jobs, the longest first, whose partial sums are added in order.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xscale_kernels.block_sparse_attention.layout import BlockLayout
from xscale_kernels.block_sparse_attention.op import ScoreModifier
from xscale_kernels.block_sparse_attention.tiles import (
    column_span,
    optional_inputs,
    row_span,
    scores,
    settings,
    store_tile,
    tile,
)


@triton.jit
def _delta_kernel(
    out, dout, delta, sdb, sdh, sdt, sdm, H, T, M, ACC: tl.constexpr, ROWS: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """The sum over the head's width of out times its gradient."""
    line = tl.program_id(1).to(tl.int64)
    batch, head = line // H, line % H
    first = tl.program_id(0) * ROWS
    left = tile(out + line * T * M, M, 1, first, T, M, ROWS, BV, False, False).to(ACC)
    right = tile(dout + batch * sdb + head * sdh, sdt, sdm, first, T, M, ROWS, BV, False, False).to(
        ACC
    )
    rows = first + tl.arange(0, ROWS)
    tl.store(delta + line * T + rows, tl.sum(left * right, 1), mask=rows < T)


@triton.jit
def _query_gradient(
    count, first, cut, skip, result, left, gradient, norm, shift, query_document, slope, k, v, blocks, key_documents,
    skt, skk, svt, svk, queries, T, S, K, M, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, CAP: tl.constexpr, SLOPED: tl.constexpr, DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_V: tl.constexpr,
):  # fmt: skip
    """Add `count` entries from `first` on, less those from cut to cut + skip, to the queries' gradient."""
    key_document = query_document
    for step in range(count):
        entry = first + step
        if MASKED and DOCUMENTS:
            entry += tl.where(entry >= cut, skip, 0)
        key = tl.load(blocks + entry) * BLOCK
        keys = key + tl.arange(0, BLOCK)
        right = tile(k, skt, skk, key, S, K, BLOCK, BK, not MASKED, EVEN_K)
        values = tile(v, svt, svk, key, S, M, BLOCK, BV, not MASKED, EVEN_V)
        product = tl.dot(left, tl.trans(right), input_precision=PRECISION, out_dtype=ACC)
        raised = tl.dot(gradient, tl.trans(values), input_precision=PRECISION, out_dtype=ACC)
        if DOCUMENTS:
            key_document = tl.load(key_documents + keys, mask=keys < S, other=-2)
        score, bend = scores(
            product, queries[:, None], keys[None, :], query_document[:, None], key_document[None, :], slope,
            T, S, scale, MASKED, True, CAUSAL, CAP, SLOPED, DOCUMENTS,
        )  # fmt: skip
        change = tl.exp2(score - norm[:, None]) * (raised - shift[:, None]) * bend
        result += tl.dot(change.to(right.dtype), right, input_precision=PRECISION, out_dtype=ACC)
    return result


@triton.jit
def _query_kernel(
    q, k, v, dout, lse, delta, dq, order, starts, blocks, query_documents, key_documents, query_ranges, key_ranges,
    slopes,
    sqb, sqh, sqt, sqk, skb, skh, skt, skk, svb, svh, svt, svk, sdb, sdh, sdt, sdm,
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
    gradient = tile(
        dout + batch * sdb + head * sdh, sdt, sdm, row * BLOCK, T, M, BLOCK, BV, False, EVEN_V
    )
    query_rows = (batch * H + head) * T + queries
    norm = tl.load(lse + query_rows, mask=queries < T, other=float("inf"))
    shift = tl.load(delta + query_rows, mask=queries < T, other=0.0)
    query_document = tl.zeros((BLOCK,), dtype=tl.int32)
    if DOCUMENTS:
        query_document = tl.load(query_documents + batch * T + queries, mask=queries < T, other=-1)
    slope = tl.load(slopes + head) if SLOPED else 0.0
    result = tl.zeros((BLOCK, BK), dtype=ACC)
    first, full_start, full_end, end = row_span(
        starts, blocks, per_head * head * R + row, row, T, S, query_ranges + 2 * batch * R,
        key_ranges + 2 * batch * tl.cdiv(S, BLOCK), CAUSAL, DOCUMENTS, BLOCK,
    )  # fmt: skip
    result = _query_gradient(
        full_end - full_start, full_start, 0, 0,
        result, left, gradient, norm, shift, query_document, slope, k, v, blocks,
        key_documents + batch * S, skt, skk, svt, svk, queries, T, S, K, M, scale,
        False, CAUSAL, CAP, SLOPED, DOCUMENTS, PRECISION, ACC, BLOCK, BK, BV, EVEN_K, EVEN_V,
    )  # fmt: skip
    result = _query_gradient(
        full_start - first + end - full_end, first if DOCUMENTS else full_end, full_start, full_end - full_start,
        result, left, gradient, norm, shift, query_document, slope, k, v, blocks,
        key_documents + batch * S, skt, skk, svt, svk, queries, T, S, K, M, scale,
        True, CAUSAL, CAP, SLOPED, DOCUMENTS, PRECISION, ACC, BLOCK, BK, BV, EVEN_K, EVEN_V,
    )  # fmt: skip
    store_tile(dq + (batch * H + head) * T * K, result * scale, row * BLOCK, T, K, BLOCK, BK)


@triton.jit
def _key_gradient(
    count, first, cut, skip, key_result, value_result, right, values, key_document, slope, q, dout, lse, delta, blocks,
    query_documents, sqt, sqk, sdt, sdm, keys, T, S, K, M, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, CAP: tl.constexpr, SLOPED: tl.constexpr, DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, EVEN_K: tl.constexpr, EVEN_V: tl.constexpr,
):  # fmt: skip
    """Add `count` entries from `first` on, less those from cut to cut + skip, to the gradients of keys and values."""
    query_document = tl.zeros((STEP,), dtype=tl.int32)
    for step in range(count * (BLOCK // STEP)):
        entry = first + step // (BLOCK // STEP)
        if MASKED:
            entry += tl.where(entry >= cut, skip, 0)
        query = tl.load(blocks + entry) * BLOCK + step % (BLOCK // STEP) * STEP
        queries = query + tl.arange(0, STEP)
        left = tile(q, sqt, sqk, query, T, K, STEP, BK, not MASKED, EVEN_K)
        gradient = tile(dout, sdt, sdm, query, T, M, STEP, BV, not MASKED, EVEN_V)
        if MASKED:
            norm = tl.load(lse + queries, mask=queries < T, other=float("inf"))
            shift = tl.load(delta + queries, mask=queries < T, other=0.0)
        else:
            norm, shift = tl.load(lse + queries), tl.load(delta + queries)
        if DOCUMENTS:
            query_document = tl.load(query_documents + queries, mask=queries < T, other=-1)
        # Keys are rows, so that the weights are the left factor of the products that follow, in registers. The ends
        # need no mask: a key behind the end changes its own row only, and a query there has the weight 0, by its norm.
        product = tl.dot(right, tl.trans(left), input_precision=PRECISION, out_dtype=ACC)
        raised = tl.dot(values, tl.trans(gradient), input_precision=PRECISION, out_dtype=ACC)
        score, bend = scores(
            product, queries[None, :], keys[:, None], query_document[None, :], key_document[:, None], slope,
            T, S, scale, MASKED, False, CAUSAL, CAP, SLOPED, DOCUMENTS,
        )  # fmt: skip
        weight = tl.exp2(score - norm[None, :])
        change = weight * (raised - shift[None, :]) * bend
        value_result += tl.dot(
            weight.to(gradient.dtype), gradient, input_precision=PRECISION, out_dtype=ACC
        )
        key_result += tl.dot(change.to(left.dtype), left, input_precision=PRECISION, out_dtype=ACC)
    return key_result, value_result


@triton.jit
def _key_kernel(
    q, k, v, dout, lse, delta, dk, dv, sums, jobs, starts, blocks, query_documents, key_documents, query_ranges,
    key_ranges, slopes,
    sqb, sqh, sqt, sqk, skb, skh, skt, skk, svb, svh, svt, svk, sdb, sdh, sdt, sdm,
    H, G, T, S, C, K, M, lanes, slots, scale,
    JOBS: tl.constexpr, PER_HEAD: tl.constexpr,
    CAUSAL: tl.constexpr, CAP: tl.constexpr, SLOPED: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
    ACC: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, STEP: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, EVEN_K: tl.constexpr, EVEN_V: tl.constexpr,
):  # fmt: skip
    # Programs: jobs, the longest first, times lanes (sequences, and kv heads that share a layout), times parts.
    part = tl.program_id(0) % (BLOCK // KEYS)
    lane = tl.program_id(0) // (BLOCK // KEYS) % lanes
    job = tl.program_id(0) // (BLOCK // KEYS) // lanes
    line, entry, entries, slot = job, 0, 0, -1
    if JOBS:
        line, entry = tl.load(jobs + 4 * job), tl.load(jobs + 4 * job + 1)
        entries, slot = tl.load(jobs + 4 * job + 2), tl.load(jobs + 4 * job + 3)
    # Registers are short: 64 bits are for products with a stride alone, and what the loops keep has 32.
    if JOBS and PER_HEAD:
        batch, group = lane, line // C
    else:
        batch, group = lane // G, lane % G
    # Where the results go, in one register: a kv head of a sequence if 0 or more, else -1 - the slot among all lanes.
    target = tl.where(slot < 0, batch * G + group, -1 - lane * slots - slot)
    key = line % C * BLOCK + part * KEYS
    keys = key + tl.arange(0, KEYS)
    k += batch.to(tl.int64) * skb + group.to(tl.int64) * skh
    v += batch.to(tl.int64) * svb + group.to(tl.int64) * svh
    right = tile(k, skt, skk, key, S, K, KEYS, BK, False, EVEN_K)
    values = tile(v, svt, svk, key, S, M, KEYS, BV, False, EVEN_V)
    key_document = tl.zeros((KEYS,), dtype=tl.int32)
    if DOCUMENTS:
        key_document = tl.load(
            key_documents + batch.to(tl.int64) * S + keys, mask=keys < S, other=-2
        )
        query_documents += batch.to(tl.int64) * T
    key_result = tl.zeros((KEYS, BK), dtype=ACC)
    value_result = tl.zeros((KEYS, BV), dtype=ACC)
    first_head = group * (H // G)
    q += batch.to(tl.int64) * sqb + first_head.to(tl.int64) * sqh
    dout += batch.to(tl.int64) * sdb + first_head.to(tl.int64) * sdh
    lse += (batch * H + first_head).to(tl.int64) * T
    delta += (batch * H + first_head).to(tl.int64) * T
    # The query heads of a kv head are summed here in order: no atomics, so gradients are deterministic.
    for member in range(H // G):
        head = first_head + member
        slope = tl.load(slopes + head) if SLOPED else 0.0
        if not JOBS:
            entry, entries = (
                tl.load(starts + head * C + line),
                tl.load(starts + head * C + line + 1),
            )
        first, full_start, after, end = column_span(
            entry, entries, blocks, key, T, S, query_ranges + 2 * batch * tl.cdiv(T, BLOCK), key_ranges + 2 * batch * C,
            CAUSAL, DOCUMENTS, BLOCK, KEYS,
        )  # fmt: skip
        key_result, value_result = _key_gradient(
            full_start - first + end - after, first, full_start, after - full_start, key_result, value_result,
            right, values, key_document, slope, q, dout, lse, delta, blocks, query_documents,
            sqt, sqk, sdt, sdm, keys, T, S, K, M, scale,
            True, CAUSAL, CAP, SLOPED, DOCUMENTS, PRECISION, ACC, BLOCK, STEP, BK, BV, EVEN_K, EVEN_V,
        )  # fmt: skip
        key_result, value_result = _key_gradient(
            after - full_start, full_start, full_start, 0, key_result, value_result, right, values, key_document,
            slope, q, dout, lse, delta, blocks, query_documents,
            sqt, sqk, sdt, sdm, keys, T, S, K, M, scale,
            False, CAUSAL, CAP, SLOPED, DOCUMENTS, PRECISION, ACC, BLOCK, STEP, BK, BV, EVEN_K, EVEN_V,
        )  # fmt: skip
        q += sqh
        dout += sdh
        lse += T
        delta += T
    if target >= 0:
        result_rows = target.to(tl.int64) * S
        store_tile(dk + result_rows * K, key_result * scale, key, S, K, KEYS, BK)
        store_tile(dv + result_rows * M, value_result, key, S, M, KEYS, BV)
    else:
        # A slot holds the block's gradient of the keys, then that of the values.
        slot_sums = sums + (-1 - target).to(tl.int64) * BLOCK * (BK + BV)
        store_tile(slot_sums, key_result * scale, part * KEYS, BLOCK, BK, KEYS, BK)
        store_tile(slot_sums + BLOCK * BK, value_result, part * KEYS, BLOCK, BV, KEYS, BV)


@triton.jit
def _sum_kernel(
    sums, columns, dk, dv, G, S, C, K, M, lanes, slots,
    PER_HEAD: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """The sums of the jobs of split columns, in order."""
    lane, split = tl.program_id(1), tl.program_id(2)
    line, first, end = (
        tl.load(columns + 3 * split),
        tl.load(columns + 3 * split + 1),
        tl.load(columns + 3 * split + 2),
    )
    if PER_HEAD:
        batch, group = lane.to(tl.int64), (line // C).to(tl.int64)
    else:
        batch, group = (lane // G).to(tl.int64), (lane % G).to(tl.int64)
    row = tl.program_id(0) * ROWS
    key_result = tl.zeros((ROWS, BK), dtype=ACC)
    value_result = tl.zeros((ROWS, BV), dtype=ACC)
    for slot in range(first, end):
        slot_sums = sums + (lane.to(tl.int64) * slots + slot) * BLOCK * (BK + BV)
        key_result += tile(slot_sums, BK, 1, row, BLOCK, BK, ROWS, BK, True, True)
        value_result += tile(slot_sums + BLOCK * BK, BV, 1, row, BLOCK, BV, ROWS, BV, True, True)
    key = line % C * BLOCK + row
    store_tile(dk + (batch * G + group) * S * K, key_result, key, S, K, ROWS, BK)
    store_tile(dv + (batch * G + group) * S * M, value_result, key, S, M, ROWS, BV)


def _delta(out: torch.Tensor, dout: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum of out times dout over the last axis, [B, H, T]."""
    B, H, T, M = out.shape
    delta = out.new_empty(B, H, T, dtype=dtype)
    BV = max(16, triton.next_power_of_2(M))
    ROWS = max(16, 4096 // BV)
    out = out.contiguous()
    _delta_kernel[(triton.cdiv(T, ROWS), B * H)](
        out, dout, delta, *dout.stride(), H, T, M,
        ACC=tl.float64 if dtype is torch.float64 else tl.float32, ROWS=ROWS, BV=BV,
    )  # fmt: skip
    return delta


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
    (B, H, T, K), (_, G, S, M) = q.shape, v.shape
    dq, dk, dv = q.new_empty(B, H, T, K), k.new_empty(B, G, S, K), v.new_empty(B, G, S, M)
    if not dq.numel():
        return dq, dk.zero_(), dv.zero_()
    delta = _delta(out, dout, lse.dtype)
    strides = (*q.stride(), *k.stride(), *v.stride(), *dout.stride())
    optional = optional_inputs(q, rule, layout.block)
    tensors, per_head, options = (
        (q, k, v, dout, lse, delta),
        layout.heads > 1,
        settings(q, v, layout, rule),
    )
    _query_kernel[(layout.rows * B * H,)](
        *tensors, dq, layout.row_order, layout.key_starts, layout.key_blocks, *optional, *strides,
        B, H, G, T, S, layout.rows, K, M, int(per_head), rule.scale, **options,
    )  # fmt: skip
    if not dk.numel():
        return dq, dk, dv
    # With a layout for each of several query heads of a kv head, a program walks the columns of all of them.
    by_jobs = not per_head or H == G
    lanes = B if per_head and by_jobs else B * G
    BK, BV = int(str(options["BK"])), int(str(options["BV"]))
    slots = layout.slots if by_jobs else 0
    sums = lse.new_empty(lanes * slots * layout.block * (BK + BV))
    jobs = layout.jobs.shape[0] if by_jobs else layout.columns
    _key_kernel[(jobs * lanes,)](
        *tensors, dk, dv, sums, layout.jobs, layout.query_starts, layout.query_blocks, *optional,
        *strides, H, G, T, S, layout.columns, K, M, lanes, slots, rule.scale,
        JOBS=by_jobs, PER_HEAD=per_head, KEYS=layout.block, STEP=min(layout.block, 32), **options,
    )  # fmt: skip
    if slots:
        rows = min(layout.block, 32)
        _sum_kernel[(layout.block // rows, lanes, layout.sums.shape[0])](
            sums, layout.sums, dk, dv, G, S, layout.columns, K, M, lanes, slots,
            PER_HEAD=per_head, ACC=options["ACC"], BLOCK=layout.block, ROWS=rows, BK=BK, BV=BV,
        )  # fmt: skip
    return dq, dk, dv
