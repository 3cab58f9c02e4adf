"""linear_attention in Triton: programs walk the chunks of a head with a slice of the state in registers.

With few heads the sequence is cut into segments, so that a GPU is busy: the segments' states are computed in parallel,
carried from segment to segment, and then each segment's outputs are computed in parallel from the state before it.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from xscale_kernels.occupancy import programs_at_once
from xscale_kernels.rows import wide

LEAST_CHUNKS = 8
"""Chunks of a segment, at least."""


@triton.jit
def _rows(
    x, sb, sh, st, sw, batch, head, start, T, columns, width,
    REVERSE: tl.constexpr, BL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The tokens of one chunk, [BL, columns] of x [B, H, T, width], zeros outside."""
    offset = tl.arange(0, BL)
    # The chunk's first token is in 64 bits; offsets from it fit in 32.
    origin = tl.cast(T - 1 - start if REVERSE else start, tl.int64)
    at = x + batch * sb + head * sh + origin * st
    at += (-offset if REVERSE else offset)[:, None] * st + columns[None, :] * sw
    mask = (start + offset < T)[:, None]
    return tl.load(at, mask=mask if EVEN else mask & (columns < width)[None, :], other=0.0)


@triton.jit
def _chunk_kernel(
    q, k, v, out, gates, documents, states, fades, last,
    sqb, sqh, sqt, sqk, skb, skh, skt, skk, svb, svh, svt, svm, H, T, K, M, length,
    REVERSE: tl.constexpr, GATED: tl.constexpr, DOCUMENTS: tl.constexpr, STATE: tl.constexpr,
    OUTPUTS: tl.constexpr, LAST: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BL: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, EVEN_K: tl.constexpr, EVEN_M: tl.constexpr,
):  # fmt: skip
    """Walk a segment of `length` tokens from the state before it: OUTPUTS, and its LAST state and decay."""
    line, segment = tl.program_id(0).to(tl.int64), tl.program_id(2)
    batch, head = line // H, line % H
    width = tl.arange(0, BK)
    out_width = tl.program_id(1) * BM + tl.arange(0, BM)
    offset = tl.arange(0, BL)
    state_at = (
        (line * tl.num_programs(2) + segment) * K * M + width[:, None] * M + out_width[None, :]
    )
    state_mask = (width < K)[:, None] & (out_width < M)[None, :]
    state = tl.zeros((BK, BM), dtype=ACC)
    if STATE:
        state = tl.load(states + state_at, mask=state_mask, other=0.0).to(ACC)
    total_fade = tl.full((1,), 1.0, dtype=ACC)
    documents += batch * T
    for start in range(segment * length, tl.minimum((segment + 1) * length, T), BL):
        right = _rows(k, skb, skh, skt, skk, batch, head, start, T, width, K, REVERSE, BL, EVEN_K)
        value = _rows(
            v, svb, svh, svt, svm, batch, head, start, T, out_width, M, REVERSE, BL, EVEN_M
        )
        step = start + offset
        token = T - 1 - step if REVERSE else step
        lead = tl.full((BL,), 1.0, dtype=ACC)
        keep = tl.full((BL,), 1.0, dtype=ACC)
        fade = tl.full((1,), 1.0, dtype=ACC)
        sums = lead
        if GATED:
            # In reverse, the state decays by the next token's gate; the last token has none.
            source = token + 1 if REVERSE else token
            gate = tl.load(gates + line * T + source, mask=(step < T) & (source < T), other=0.0).to(
                ACC
            )
            sums = tl.cumsum(gate, 0)
            decay = tl.sum(gate, 0)
            lead *= tl.exp(sums)
            keep *= tl.exp(decay - sums)
            fade *= tl.exp(decay)
        document = offset
        if DOCUMENTS:
            document = tl.load(documents + token, mask=step < T, other=-1)
            final = tl.minimum(start + BL, T) - 1
            final_document = tl.load(documents + (T - 1 - final if REVERSE else final))
            before = tl.maximum(start - 1, 0)
            state_document = tl.load(documents + (T - 1 - before if REVERSE else before))
            lead = tl.where(document == state_document, lead, 0.0)
            keep = tl.where(document == final_document, keep, 0.0)
            fade = tl.where(final_document == state_document, fade, 0.0)
        if OUTPUTS:
            left = _rows(
                q, sqb, sqh, sqt, sqk, batch, head, start, T, width, K, REVERSE, BL, EVEN_K
            )
            score = tl.dot(left, tl.trans(right), input_precision=PRECISION, out_dtype=ACC)
            seen = offset[:, None] >= offset[None, :]
            if DOCUMENTS:
                seen = seen & (document[:, None] == document[None, :])
            if GATED:
                score *= tl.exp(tl.where(seen, sums[:, None] - sums[None, :], 0.0))
            score = tl.where(seen, score, 0.0)
            result = tl.dot(score.to(left.dtype), value, input_precision=PRECISION, out_dtype=ACC)
            decayed = left
            if GATED or DOCUMENTS:
                decayed = (left.to(ACC) * lead[:, None]).to(left.dtype)
            result += tl.dot(
                decayed, state.to(left.dtype), input_precision=PRECISION, out_dtype=ACC
            )
            out_at = out + (line * T + token[:, None]) * M + out_width[None, :]
            tl.store(
                out_at,
                result.to(out.dtype.element_ty),
                mask=(step < T)[:, None] & (out_width < M)[None, :],
            )
        if GATED or DOCUMENTS:
            right = (right.to(ACC) * keep[:, None]).to(right.dtype)
            state *= fade[:, None]
            total_fade *= fade
        state += tl.dot(tl.trans(right), value, input_precision=PRECISION, out_dtype=ACC)
    if LAST:
        tl.store(last + state_at, state, mask=state_mask)
        tl.store(fades + line * tl.num_programs(2) + segment + tl.arange(0, 1), total_fade)


@triton.jit
def _carry_kernel(
    states,
    fades,
    first,
    last,
    segments,
    size,
    STATE: tl.constexpr,
    ACC: tl.constexpr,
    BN: tl.constexpr,
):
    """Replace each segment's own state by the state before it; `last` is the state after all."""
    line = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = at < size
    carry = tl.zeros((BN,), dtype=ACC)
    if STATE:
        carry = tl.load(first + line * size + at, mask=mask, other=0.0).to(ACC)
    for segment in range(segments):
        state_at = states + (line * segments + segment) * size + at
        added = tl.load(state_at, mask=mask, other=0.0)
        tl.store(state_at, carry, mask=mask)
        carry = carry * tl.load(fades + line * segments + segment) + added
    tl.store(last + line * size + at, carry, mask=mask)


def _segments(T: int, chunk: int, programs: int, resident: int) -> int:
    """Segments of a sequence, in each of which the launch has `programs` programs, `resident` of which run at once."""
    return max(1, min(resident // programs, T // (LEAST_CHUNKS * chunk)))


@functools.lru_cache(maxsize=256)
def _resident(
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    K: int,
    M: int,
    settings: tuple[tuple[str, Any], ...],
) -> int:
    """Programs of the kernel that computes the segments' outputs that are resident on the GPU at once.

    By the registers that the compiler gave it: with gates, documents and a state it takes several times as many as
    without, so that an SM holds one program or four. `dtypes` of the queries, the log decays and the documents.
    """
    if device.type != "cuda":
        return 1
    options = dict(settings)
    q, log_decay, documents = (torch.empty(16, device=device, dtype=dtype) for dtype in dtypes)
    fades = torch.empty(16, device=device, dtype=wide(dtypes[0]))
    length = LEAST_CHUNKS * options["BL"]
    of_keys, of_values = (length * K, length * K, K, 1), (length * M, length * M, M, 1)
    kernel = _chunk_kernel.warmup(
        q, q, q, q, log_decay, documents, fades, fades, fades, *of_keys, *of_keys, *of_values, 16, length, K, M, length,
        STATE=True, OUTPUTS=True, LAST=False, grid=(1,), **options,
    )  # fmt: skip
    return programs_at_once(kernel, options["num_warps"], device)


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor | None,
    documents: torch.Tensor | None,
    state: torch.Tensor | None,
    reverse: bool,
    chunk: int,
    segments: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton `chunked.scan`. segments: the number that the sequence is cut into; None: what fits the GPU."""
    (B, H, T, K), M = q.shape, v.shape[3]
    compute = wide(q.dtype)
    out, last = v.new_empty(B, H, T, M), q.new_empty(B, H, K, M, dtype=compute)
    if not last.numel():
        return out, last
    BL, BK, BM = (
        max(16, chunk),
        max(16, triton.next_power_of_2(K)),
        min(64, max(16, triton.next_power_of_2(M))),
    )
    tiles = triton.cdiv(M, BM)
    acc = tl.float64 if compute is torch.float64 else tl.float32
    first = None if state is None else state.contiguous()
    tensors = (
        q if log_decay is None else log_decay.contiguous(),
        q if documents is None else documents.contiguous(),
    )
    settings = {
        "REVERSE": reverse, "GATED": log_decay is not None, "DOCUMENTS": documents is not None,
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee", "ACC": acc, "BL": BL, "BK": BK,
        "BM": BM, "EVEN_K": BK == K, "EVEN_M": M % BM == 0, "num_stages": 2,
        # With four warps a state of 128 x 64, its decay and its chunk do not fit in registers.
        "num_warps": 8 if BK * BM > 64 * 64 else 4,
    }  # fmt: skip
    dtypes = (q.dtype, tensors[0].dtype, tensors[1].dtype)
    if segments is None:
        resident = _resident(q.device, dtypes, K, M, tuple(settings.items()))
        segments = _segments(T, BL, B * H * tiles, resident)
    length = triton.cdiv(triton.cdiv(T, segments), BL) * BL
    segments = int(triton.cdiv(T, length))
    fades = last.new_empty(B * H, segments)
    states = last.new_empty(B * H, segments, K, M) if segments > 1 else last
    arguments = (
        *q.stride(), *k.stride(), *v.stride(), H, T, K, M, length,
    )  # fmt: skip
    grid = (B * H, tiles, segments)
    if segments == 1:
        initial = last if first is None else first
        _chunk_kernel[grid](
            q, k, v, out, *tensors, initial, fades, last, *arguments, STATE=first is not None, OUTPUTS=True, LAST=True,
            **settings,
        )  # fmt: skip
        return out, last
    _chunk_kernel[grid](
        q,
        k,
        v,
        out,
        *tensors,
        states,
        fades,
        states,
        *arguments,
        STATE=False,
        OUTPUTS=False,
        LAST=True,
        **settings,
    )
    _carry_kernel[(B * H, triton.cdiv(K * M, 1024))](
        states, fades, last if first is None else first, last, segments, K * M, STATE=first is not None, ACC=acc,
        BN=1024,
    )  # fmt: skip
    _chunk_kernel[grid](
        q,
        k,
        v,
        out,
        *tensors,
        states,
        fades,
        states,
        *arguments,
        STATE=True,
        OUTPUTS=True,
        LAST=False,
        **settings,
    )
    return out, last
