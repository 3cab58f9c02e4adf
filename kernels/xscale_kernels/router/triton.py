"""route in Triton: scores and top-k of each token in one launch, and one launch for the gradient."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl

from xscale_kernels.router.op import slots as sorted_slots
from xscale_kernels.rows import wide

MAX_EXPERTS = 4096
MAX_SCANNED_EXPERTS = 256


@triton.jit
def _forward_kernel(
    logits, bias, scores, weights, experts, N, E, sn, se,
    k: tl.constexpr, SOFTMAX: tl.constexpr, BIASED: tl.constexpr, ACC: tl.constexpr,
    BN: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    columns = tl.arange(0, BE)
    row_mask = rows < N
    mask = row_mask[:, None] & (columns < E)[None, :]
    value = tl.load(
        logits + rows[:, None] * sn + columns[None, :] * se, mask=mask, other=float("-inf")
    ).to(ACC)
    if SOFTMAX:
        # Rows past the end are -inf; a maximum of 0 avoids NaN.
        top = tl.max(value, 1)
        power = tl.exp(value - tl.where(row_mask, top, 0.0)[:, None])
        score = power / tl.where(row_mask, tl.sum(power, 1), 1.0)[:, None]
    else:
        score = 1 / (1 + tl.exp(-value))
    tl.store(scores + rows[:, None] * E + columns[None, :], score, mask=mask)
    rank = score
    if BIASED:
        rank += tl.load(bias + columns, mask=columns < E, other=0.0).to(ACC)[None, :]
    rank = tl.where((columns < E)[None, :], rank, float("-inf"))
    for choice in tl.static_range(k):
        best = tl.argmax(rank, 1)
        is_best = columns[None, :] == best[:, None]
        tl.store(experts + rows * k + choice, best.to(tl.int64), mask=row_mask)
        tl.store(
            weights + rows * k + choice, tl.sum(tl.where(is_best, score, 0.0), 1), mask=row_mask
        )
        rank = tl.where(is_best, float("-inf"), rank)


@triton.jit
def _backward_kernel(
    scores, experts, dscores, dweights, dlogits, N, E,
    k: tl.constexpr, SOFTMAX: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    columns = tl.arange(0, BE)
    row_mask = rows < N
    mask = row_mask[:, None] & (columns < E)[None, :]
    at = rows[:, None] * E + columns[None, :]
    score = tl.load(scores + at, mask=mask, other=0.0)
    grad = tl.load(dscores + at, mask=mask, other=0.0)
    for choice in tl.static_range(k):
        chosen = tl.load(experts + rows * k + choice, mask=row_mask, other=-1)
        extra = tl.load(dweights + rows * k + choice, mask=row_mask, other=0.0)
        grad += tl.where(columns[None, :] == chosen[:, None], extra[:, None], 0.0)
    if SOFTMAX:
        out = score * (grad - tl.sum(score * grad, 1)[:, None])
    else:
        out = grad * score * (1 - score)
    tl.store(dlogits + at, out.to(dlogits.dtype.element_ty), mask=mask)


def _blocks(N: int, E: int) -> dict[str, int]:
    BE = triton.next_power_of_2(E)
    return {"BE": BE, "BN": max(1, min(4096 // BE, triton.next_power_of_2(max(N, 1))))}


@triton.jit
def _slots_kernel(
    experts, places, counts, N, M, k: tl.constexpr, CHOICE: tl.constexpr, BM: tl.constexpr
):
    # One program scans all assignments for its expert, so positions are ordered and reproducible: no sort, no atomics.
    expert = tl.program_id(0)
    before = tl.zeros((1,), dtype=tl.int64)
    for start in range(0, M, BM):
        at = start + tl.arange(0, BM)
        mask = at < M
        # By choice: all tokens' first choices, then all second ones; in memory a token's choices are adjacent.
        assignment = (at % N) * k + at // N if CHOICE else at
        assigned = (tl.load(experts + assignment, mask=mask, other=-1) == expert) & mask
        rank = tl.cumsum(assigned.to(tl.int64), 0)
        tl.store(places + assignment, before + rank - 1, mask=assigned)
        before += tl.sum(assigned.to(tl.int64), 0)
    tl.store(counts + expert + tl.arange(0, 1), before)


def slots(
    experts: torch.Tensor, E: int, *, order: Literal["choice", "token"]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton implementation of `slots`: one launch if experts are few; each expert's program reads all assignments."""
    (N, k), M = experts.shape, experts.numel()
    if E > MAX_SCANNED_EXPERTS or not M:
        return sorted_slots(experts, E, order=order)
    experts = experts.contiguous()
    places, counts = torch.empty_like(experts), experts.new_empty(E)
    _slots_kernel[(E,)](
        experts, places, counts, N, M, k=k, CHOICE=order == "choice", BM=min(4096, triton.next_power_of_2(M)),
        num_warps=8,
    )  # fmt: skip
    return places, counts


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, k: int, bias: torch.Tensor | None, score: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        N, E = logits.shape
        compute = wide(logits.dtype)
        scores, weights = (
            logits.new_empty(N, E, dtype=compute),
            logits.new_empty(N, k, dtype=compute),
        )
        experts = logits.new_empty(N, k, dtype=torch.int64)
        blocks, bias = _blocks(N, E), None if bias is None else bias.contiguous()
        if N:
            _forward_kernel[(triton.cdiv(N, blocks["BN"]),)](
                logits, logits if bias is None else bias, scores, weights, experts, N, E, *logits.stride(),
                k=k, SOFTMAX=score == "softmax", BIASED=bias is not None,
                ACC=tl.float64 if compute is torch.float64 else tl.float32, **blocks,
            )  # fmt: skip
        ctx.mark_non_differentiable(experts)
        ctx.save_for_backward(scores, experts)
        ctx.score, ctx.dtype = score, logits.dtype
        return scores, weights, experts

    @staticmethod
    def backward(
        ctx: Any, dscores: torch.Tensor, dweights: torch.Tensor, _: Any
    ) -> tuple[torch.Tensor, None, None, None]:
        scores, experts = ctx.saved_tensors
        (N, E), k = scores.shape, experts.shape[1]
        dlogits = scores.new_empty(N, E, dtype=ctx.dtype)
        blocks = _blocks(N, E)
        if N:
            _backward_kernel[(triton.cdiv(N, blocks["BN"]),)](
                scores, experts, dscores.contiguous(), dweights.contiguous(), dlogits, N, E,
                k=k, SOFTMAX=ctx.score == "softmax", **blocks,
            )  # fmt: skip
        return dlogits, None, None, None


def route(
    logits: torch.Tensor, k: int, bias: torch.Tensor | None, score: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Triton implementation of `reference_route`; of equal scores the lower expert comes first."""
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    out = _Route.apply(logits, k, bias, score)  # type: ignore[no-untyped-call]
    return out
