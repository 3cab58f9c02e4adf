"""cross_entropy in Triton: one pass for a row's maximum and sum, a second for its gradient, over the logits."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xscale_kernels.cross_entropy.op import LossTerms


@triton.jit
def _capped(values, CAP: tl.constexpr):
    # tanh through the exponential of a negative number, which cannot overflow.
    ratio = values / CAP
    shrink = tl.exp(-2 * tl.abs(ratio))
    size = (1 - shrink) / (1 + shrink)
    return tl.where(ratio < 0, -size, size)


@triton.jit
def _kernel(
    logits, targets, losses, lses, seeds, gradients, V, sn, sv, gn,
    IGNORE: tl.constexpr, CAP: tl.constexpr, Z: tl.constexpr, SMOOTH: tl.constexpr,
    KNOWN: tl.constexpr, BACK: tl.constexpr, WIDE: tl.constexpr, BV: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    kept = target != IGNORE
    columns = tl.arange(0, BV)
    row_start = logits + row * sn
    if KNOWN:
        lse = tl.load(lses + row).to(WIDE)
    else:
        top = tl.full((BV // LANE,), float("-inf"), dtype=WIDE)
        total = tl.zeros((BV // LANE,), dtype=WIDE)
        mean = tl.zeros((BV // LANE,), dtype=WIDE)
        # Each LANE of neighbouring columns keeps a running maximum and sum, in base 2: one exponential a column, and
        # one a step to rescale the sum. They are combined once, after the row.
        for start in range(0, V, BV):
            mask = columns < V - start
            value = tl.load(
                row_start + tl.cast(start, tl.int64) * sv + columns * sv,
                mask=mask,
                other=float("-inf"),
            )
            value = value.to(WIDE)
            if CAP > 0:
                value = tl.where(mask, CAP * _capped(value, CAP), float("-inf"))
            if SMOOTH > 0:
                mean += tl.sum(tl.reshape(tl.where(mask, value, 0.0), (BV // LANE, LANE)), 1)
            power = tl.reshape(value * 1.4426950408889634, (BV // LANE, LANE))
            higher = tl.maximum(top, tl.max(power, 1))
            # A lane that has seen only -inf must not compute -inf - -inf.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp2(top - base) + tl.sum(tl.exp2(power - base[:, None]), 1)
            top = higher
        highest = tl.max(top, 0)
        lse = (highest + tl.log2(tl.sum(total * tl.exp2(top - highest), 0))) * 0.6931471805599453
        picked = tl.load(row_start + tl.where(kept, target, 0) * sv).to(WIDE)
        if CAP > 0:
            picked = CAP * _capped(picked, CAP)
        loss = lse - (1 - SMOOTH) * picked + Z * lse * lse
        if SMOOTH > 0:
            loss -= SMOOTH * (tl.sum(mean, 0) / V)
        tl.store(losses + row, tl.where(kept, loss, 0.0))
        tl.store(lses + row, lse)
    if BACK:
        seed = tl.where(kept, tl.load(seeds + row).to(WIDE), 0.0)
        scale = seed * (1 + 2 * Z * lse)
        # The gradient may alias the logits: every thread must have read the target's logit before any is overwritten.
        tl.debug_barrier()
        target_column = target.to(tl.int32)
        for start in range(0, V, BV):
            at = start + columns
            mask = at < V
            value = tl.load(
                row_start + tl.cast(start, tl.int64) * sv + columns * sv,
                mask=mask,
                other=float("-inf"),
            )
            value = value.to(WIDE)
            if CAP > 0:
                squashed = _capped(value, CAP)
                value = tl.where(mask, CAP * squashed, float("-inf"))
            out = scale * tl.exp(value - lse) - seed * (SMOOTH / V)
            out = tl.where(at == target_column, out - seed * (1 - SMOOTH), out)
            if CAP > 0:
                out *= 1 - squashed * squashed
            # An ignored row gets zeros even if its logits are NaN.
            out = tl.where(kept, out, 0.0)
            tl.store(gradients + row * gn + at, out.to(gradients.dtype.element_ty), mask=mask)


def launch(
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    lses: torch.Tensor,
    seeds: torch.Tensor | None,
    gradients: torch.Tensor | None,
    terms: LossTerms,
    known: bool,
    block: int | None = None,
) -> None:
    """Fill losses [N] and lses [N] (unless `known`) and, with seeds [N], the gradients [N, V].

    The gradients' rows must be contiguous; they may be the logits' own memory. block: columns a step, a power of two.
    """
    N, V = logits.shape
    if N == 0:
        return
    assert gradients is None or gradients.stride(1) == 1
    accumulator_type = tl.float64 if logits.dtype is torch.float64 else tl.float32
    BV = block or min(4096, triton.next_power_of_2(V))
    _kernel[(N,)](
        logits, targets, losses, lses, losses if seeds is None else seeds, logits if gradients is None else gradients,
        V, *logits.stride(), 0 if gradients is None else gradients.stride(0),
        IGNORE=terms.ignore_index, CAP=terms.softcap, Z=terms.z_loss, SMOOTH=terms.label_smoothing,
        KNOWN=known, BACK=gradients is not None, WIDE=accumulator_type, BV=BV, LANE=min(8, BV),
        num_warps=8,
    )  # fmt: skip


def forward(
    logits: torch.Tensor, targets: torch.Tensor, terms: LossTerms
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton implementation of `chunked.forward`."""
    compute = torch.promote_types(logits.dtype, torch.float32)
    losses, lses = (logits.new_empty(logits.shape[0], dtype=compute) for _ in range(2))
    launch(logits, targets, losses, lses, None, None, terms, known=False)
    return losses, lses


def backward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    seed: torch.Tensor,
    terms: LossTerms,
) -> torch.Tensor:
    """Triton implementation of `chunked.backward`."""
    gradients = torch.empty_like(logits, memory_format=torch.contiguous_format)
    launch(logits, targets, lse, lse, seed, gradients, terms, known=True)
    return gradients
