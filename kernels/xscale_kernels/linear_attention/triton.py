"""linear_attention in Triton: one program walks one head's sequence with a slice of the state in registers."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xscale_kernels.rows import wide


@triton.jit
def _kernel(
    q, k, v, out, gates, documents, first, last,
    sqb, sqh, sqt, sqk, skb, skh, skt, skk, svb, svh, svt, svm, H, T, K, M,
    REVERSE: tl.constexpr, GATED: tl.constexpr, DOCUMENTS: tl.constexpr, STATE: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr, BL: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    width = tl.arange(0, BK)
    out_width = tl.program_id(1) * BM + tl.arange(0, BM)
    place = tl.arange(0, BL)
    state_at = ((batch * H + head) * K + width[:, None]) * M + out_width[None, :]
    state_mask = (width < K)[:, None] & (out_width < M)[None, :]
    state = tl.zeros((BK, BM), dtype=ACC)
    if STATE:
        state = tl.load(first + state_at, mask=state_mask, other=0.0).to(ACC)
    here = batch * T
    for start in range(0, T, BL):
        step = start + place
        inside = step < T
        token = T - 1 - step if REVERSE else step
        row_mask = inside[:, None] & (width < K)[None, :]
        out_mask = inside[:, None] & (out_width < M)[None, :]
        left = tl.load(
            q + batch * sqb + head * sqh + token[:, None] * sqt + width[None, :] * sqk, mask=row_mask, other=0.0
        )
        right = tl.load(
            k + batch * skb + head * skh + token[:, None] * skt + width[None, :] * skk, mask=row_mask, other=0.0
        )
        value = tl.load(
            v + batch * svb + head * svh + token[:, None] * svt + out_width[None, :] * svm, mask=out_mask, other=0.0
        )
        score = tl.dot(left, tl.trans(right), input_precision=PRECISION, out_dtype=ACC)
        score = tl.where(place[:, None] >= place[None, :], score, 0.0)
        lead = tl.full((BL,), 1.0, dtype=ACC)
        keep = tl.full((BL,), 1.0, dtype=ACC)
        fade = tl.full((1,), 1.0, dtype=ACC)
        if GATED:
            # Backwards, a state decays by what the next token brought; nothing comes after the last.
            source = token + 1 if REVERSE else token
            gate = tl.load(gates + (batch * H + head) * T + source, mask=inside & (source < T), other=0.0).to(ACC)
            total = tl.cumsum(gate, 0)
            whole = tl.sum(gate, 0)
            distance = tl.where(place[:, None] >= place[None, :], total[:, None] - total[None, :], 0.0)
            score *= tl.exp(distance)
            lead *= tl.exp(total)
            keep *= tl.exp(whole - total)
            fade *= tl.exp(whole)
        if DOCUMENTS:
            mine = tl.load(documents + here + token, mask=inside, other=-1)
            final = tl.minimum(start + BL, T) - 1
            edge = tl.load(documents + here + (T - 1 - final if REVERSE else final))
            back = tl.maximum(start - 1, 0)
            owner = tl.load(documents + here + (T - 1 - back if REVERSE else back))
            score = tl.where(mine[:, None] == mine[None, :], score, 0.0)
            lead = tl.where(mine == owner, lead, 0.0)
            keep = tl.where(mine == edge, keep, 0.0)
            fade = tl.where(edge == owner, fade, 0.0)
        kind = left.dtype
        result = tl.dot(score.to(kind), value, input_precision=PRECISION, out_dtype=ACC)
        led = (left.to(ACC) * lead[:, None]).to(kind)
        result += tl.dot(led, state.to(kind), input_precision=PRECISION, out_dtype=ACC)
        kept = (right.to(ACC) * keep[:, None]).to(kind)
        state = state * fade[:, None] + tl.dot(tl.trans(kept), value, input_precision=PRECISION, out_dtype=ACC)
        out_at = out + ((batch * H + head) * T + token[:, None]) * M + out_width[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=out_mask)
    tl.store(last + state_at, state, mask=state_mask)


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor | None,
    documents: torch.Tensor | None,
    state: torch.Tensor | None,
    reverse: bool,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As chunked.scan."""
    (B, H, T, K), M = q.shape, v.shape[3]
    compute = wide(q.dtype)
    out, last = v.new_empty(B, H, T, M), q.new_empty(B, H, K, M, dtype=compute)
    BM = min(64, max(16, triton.next_power_of_2(M)))
    if last.numel():
        _kernel[(B * H, triton.cdiv(M, BM))](
            q, k, v, out, q if log_decay is None else log_decay.contiguous(),
            q if documents is None else documents.contiguous(), q if state is None else state.contiguous(), last,
            *q.stride(), *k.stride(), *v.stride(), H, T, K, M,
            REVERSE=reverse, GATED=log_decay is not None, DOCUMENTS=documents is not None, STATE=state is not None,
            PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
            ACC=tl.float64 if compute is torch.float64 else tl.float32,
            BL=max(16, chunk), BK=max(16, triton.next_power_of_2(K)), BM=BM, num_warps=4, num_stages=2,
        )  # fmt: skip
    return out, last
