"""Parts of the kernels of block_sparse_attention: tiles of memory, scores, and which entries of a list need a mask."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from xscale_kernels.block_sparse_attention.layout import BlockLayout
from xscale_kernels.block_sparse_attention.op import ScoreModifier
from xscale_kernels.block_sparse_attention.shared_memory import limit_of, stages


@triton.jit
def tile(
    x, row_stride, column_stride, first, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INSIDE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Rows first .. first + ROWS of x [rows, columns], zeros outside. INSIDE, EVEN: no row, no column is outside."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    # The tile's start is in 64 bits; offsets inside it fit in 32 (op.py refuses other strides).
    start = x + tl.cast(first, tl.int64) * row_stride
    at = start + row[:, None] * row_stride + column[None, :] * column_stride
    if INSIDE and EVEN:
        value = tl.load(at)
    elif INSIDE:
        value = tl.load(at, mask=(column < columns)[None, :], other=0.0)
    elif EVEN:
        value = tl.load(at, mask=(first + row < rows)[:, None], other=0.0)
    else:
        value = tl.load(
            at, mask=(first + row < rows)[:, None] & (column < columns)[None, :], other=0.0
        )
    return value


@triton.jit
def store_tile(x, value, first, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write rows first .. first + ROWS of a contiguous x [rows, columns]."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = x + tl.cast(first, tl.int64) * columns + (row[:, None] * columns + column[None, :])
    # Not first + row < rows: the compiler would keep that mask of the loads in registers until the end.
    mask = (row < rows - first)[:, None] & (column < columns)[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _squash(score, CAP: tl.constexpr):
    """tanh(score / CAP), through the exponential of a negative number, which cannot overflow."""
    ratio = score / CAP
    shrink = tl.exp(-2 * tl.abs(ratio))
    size = (1 - shrink) / (1 + shrink)
    return tl.where(ratio < 0, -size, size)


@triton.jit
def scores(
    product, queries, keys, query_documents, key_documents, slope, T, S, scale,
    MASKED: tl.constexpr, ENDS: tl.constexpr, CAUSAL: tl.constexpr, CAP: tl.constexpr, SLOPED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Scores in base 2, if MASKED with -inf where a key is hidden, and the soft cap's derivative.

    product: queries times keys, or its transpose. queries and keys: positions, and documents likewise, of shapes that
    broadcast to it. ENDS: whether positions behind the ends of the sequences are hidden too.
    """
    bend = 1.0
    if CAP > 0:
        squashed = _squash(product * scale, CAP)
        score = CAP * 1.4426950408889634 * squashed
        bend = 1 - squashed * squashed
    else:
        score = product * (scale * 1.4426950408889634)
    if SLOPED:
        score -= (slope * 1.4426950408889634) * tl.abs(queries + (S - T) - keys).to(score.dtype)
    if MASKED and ENDS:
        score = tl.where((keys < S) & (queries < T), score, float("-inf"))
    if MASKED and CAUSAL:
        score = tl.where(queries + (S - T) >= keys, score, float("-inf"))
    if MASKED and DOCUMENTS:
        score = tl.where(query_documents == key_documents, score, float("-inf"))
    return score, bend


@triton.jit
def _first_entry(
    first, end, blocks, ranges, low, high, WHOLE: tl.constexpr, WANTED: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """The first entry of a list with a property, or `end`: whether its documents `ranges` [blocks, 2] meet low .. high.

    WHOLE: whether both have one document, and the same. WANTED: whether the property is to hold.
    """
    going = first < end
    while going:
        entry = first + tl.arange(0, STEP)
        block = tl.load(blocks + entry, mask=entry < end, other=0)
        lowest = tl.load(ranges + 2 * block, mask=entry < end, other=0)
        highest = tl.load(ranges + 2 * block + 1, mask=entry < end, other=0)
        if WHOLE:
            holds = (lowest == highest) & (lowest == low) & (highest == high)
        else:
            holds = (lowest <= high) & (highest >= low)
        count = tl.min(tl.where((holds == WANTED) & (entry < end), tl.arange(0, STEP), STEP), 0)
        first = tl.minimum(first + count, end)
        going = (count == STEP) & (first < end)
    return first


@triton.jit
def _end_of_document(first, end, blocks, ranges, low, high, STEP: tl.constexpr):
    """The entry behind the last one whose documents meet low .. high, or `first`."""
    going = first < end
    while going:
        entry = end - 1 - tl.arange(0, STEP)
        block = tl.load(blocks + entry, mask=entry >= first, other=0)
        lowest = tl.load(ranges + 2 * block, mask=entry >= first, other=0)
        highest = tl.load(ranges + 2 * block + 1, mask=entry >= first, other=0)
        meets = (lowest <= high) & (highest >= low) & (entry >= first)
        count = tl.min(tl.where(meets, tl.arange(0, STEP), STEP), 0)
        end = tl.maximum(end - count, first)
        going = (count == STEP) & (first < end)
    return end


@triton.jit
def document_span(first, limit, end, blocks, ranges, low, high):
    """Entries (first, first whole, end of the whole ones, end): blocks of other documents at both ends are left out.

    Whole blocks and the caller's block are of one document, and before `limit`. Documents of any order are right; of
    packed sequences, whose documents ascend, nothing else is left to skip.
    """
    STEP: tl.constexpr = 32
    first = _first_entry(first, end, blocks, ranges, low, high, False, True, STEP)
    end = _end_of_document(first, end, blocks, ranges, low, high, STEP)
    limit = tl.maximum(tl.minimum(limit, end), first)
    full_start = _first_entry(first, limit, blocks, ranges, low, high, True, True, STEP)
    full_end = _first_entry(full_start, limit, blocks, ranges, low, high, True, False, STEP)
    return first, full_start, full_end, end


@triton.jit
def row_span(
    starts, blocks, at, row, T, S, query_ranges, key_ranges,
    CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's entries (first, first whole, end of the whole ones, end); blocks that no query sees are left out."""
    first, end = tl.load(starts + at), tl.load(starts + at + 1)
    earliest = row * BLOCK + S - T
    if CAUSAL:
        while (end > first) & (
            tl.load(blocks + end - 1, mask=end > first, other=0) * BLOCK > earliest + BLOCK - 1
        ):
            end -= 1
    # The last key that every query of the row sees, or the last one of the sequence. Entries are ascending.
    limit = tl.minimum(S - 1, earliest) if CAUSAL else S - 1
    full_start, full_end = first, end
    while (full_end > first) & (
        tl.load(blocks + full_end - 1, mask=full_end > first, other=0) * BLOCK + BLOCK - 1 > limit
    ):
        full_end -= 1
    if DOCUMENTS:
        low, high = tl.load(query_ranges + 2 * row), tl.load(query_ranges + 2 * row + 1)
        first, full_start, full_end, end = document_span(
            first, full_end, end, blocks, key_ranges, low, high
        )
    return first, full_start, full_end, end


@triton.jit
def column_span(
    first, end, blocks, key, T, S, query_ranges, key_ranges,
    CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A column's entries (first, start of the whole blocks, their end, end); blocks before the keys are left out."""
    if CAUSAL:
        while (first < end) & (
            tl.load(blocks + first, mask=first < end, other=0) * BLOCK + BLOCK - 1 + S - T < key
        ):
            first += 1
    full_start, after = first, end
    if CAUSAL:
        while (full_start < end) & (
            tl.load(blocks + full_start, mask=full_start < end, other=0) * BLOCK + S - T
            < key + KEYS - 1
        ):
            full_start += 1
    # Entries are ascending, so the block that the end of the queries cuts is the last.
    while (after > full_start) & (
        tl.load(blocks + after - 1, mask=after > full_start, other=0) * BLOCK + BLOCK > T
    ):
        after -= 1
    if DOCUMENTS:
        low, high = (
            tl.load(key_ranges + 2 * (key // BLOCK)),
            tl.load(key_ranges + 2 * (key // BLOCK) + 1),
        )
        # Those that the causal order cuts come first, and may be of another document than the whole ones.
        cut = full_start
        first, _, _, end = document_span(first, first, end, blocks, query_ranges, low, high)
        cut = tl.minimum(tl.maximum(cut, first), end)
        _, full_start, after, _ = document_span(
            cut, tl.minimum(after, end), end, blocks, query_ranges, low, high
        )
    return first, full_start, after, end


def settings(
    q: torch.Tensor, v: torch.Tensor, layout: BlockLayout, rule: ScoreModifier
) -> dict[str, object]:
    K, M = q.shape[3], v.shape[3]
    BK, BV = (max(16, triton.next_power_of_2(width)) for width in (K, M))
    return {
        "CAUSAL": rule.causal,
        "CAP": rule.softcap,
        "SLOPED": rule.slopes is not None,
        "DOCUMENTS": rule.query_documents is not None,
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "ACC": tl.float64 if q.dtype is torch.float64 else tl.float32,
        "BLOCK": layout.block,
        "BK": BK,
        "BV": BV,
        "EVEN_K": BK == K,
        "EVEN_V": BV == M,
        # With four warps the accumulators of 64 x 256 spill (2 KB a thread, against 0.2).
        "num_warps": 8 if layout.block >= 128 or layout.block * max(BK, BV) > 64 * 128 else 4,
        "num_stages": stages(layout.block, BK, BV, q.element_size(), limit_of(q.device)),
    }


def optional_inputs(q: torch.Tensor, rule: ScoreModifier, block: int) -> tuple[torch.Tensor, ...]:
    """Documents, their ranges in blocks, and slopes, with q for absent ones, which the kernel does not read."""
    documents = rule.query_documents, rule.key_documents
    ranges = (None if ids is None else _document_ranges(ids, block) for ids in documents)
    return tuple(q if tensor is None else tensor for tensor in (*documents, *ranges, rule.slopes))


def _document_ranges(documents: torch.Tensor, block: int) -> torch.Tensor:
    """The least and the greatest document [B, R, 2] of each block of documents [B, T], int32."""
    (B, T), limits = documents.shape, torch.iinfo(torch.int32)
    rows = triton.cdiv(T, block)
    least, greatest = (
        F.pad(documents, (0, rows * block - T), value=fill).view(B, rows, block)
        for fill in (limits.max, limits.min)
    )
    return torch.stack((least.amin(2), greatest.amax(2)), 2)
