"""unpermute in Triton: one program sums one token's rows, in a fixed order and in float32, so the result repeats."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xscale_kernels.permute.op import sorted_rows


@triton.jit
def _sum_kernel(
    y,
    order,
    starts,
    weights,
    out,
    D,
    sym,
    syd,
    WEIGHTED: tl.constexpr,
    ACC: tl.constexpr,
    BD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BD + tl.arange(0, BD)
    mask = columns < D
    total = tl.zeros((BD,), dtype=ACC)
    for at in range(tl.load(starts + token), tl.load(starts + token + 1)):
        row = tl.load(order + at)
        value = tl.load(y + row * sym + columns * syd, mask=mask, other=0.0).to(ACC)
        if WEIGHTED:
            value *= tl.load(weights + row).to(ACC)
        total += value
    tl.store(out + token * D + columns, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _spread_kernel(
    dout,
    y,
    tokens,
    weights,
    dy,
    dweights,
    D,
    son,
    sod,
    sym,
    syd,
    ACC: tl.constexpr,
    BD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    weight = tl.load(weights + row).to(ACC)
    total = tl.zeros((BD,), dtype=ACC)
    for start in range(0, D, BD):
        columns = start + tl.arange(0, BD)
        mask = columns < D
        gradient = tl.load(dout + token * son + columns * sod, mask=mask, other=0.0).to(ACC)
        total += gradient * tl.load(y + row * sym + columns * syd, mask=mask, other=0.0).to(ACC)
        tl.store(dy + row * D + columns, (gradient * weight).to(dy.dtype.element_ty), mask=mask)
    tl.store(dweights + row, tl.sum(total, 0).to(dweights.dtype.element_ty))


def _wide(tensor: torch.Tensor) -> object:
    return tl.float64 if tensor.dtype is torch.float64 else tl.float32


def unpermute(
    y: torch.Tensor,
    tokens: torch.Tensor,
    weights: torch.Tensor | None,
    N: int,
    token_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Triton implementation of `reference_unpermute`."""
    D = y.shape[1]
    out = y.new_empty(N, D)
    if out.numel() == 0:
        return out
    weights = None if weights is None else weights.contiguous()
    order, starts = sorted_rows(tokens, N, token_rows)
    BD = min(1024, triton.next_power_of_2(D))
    _sum_kernel[(N, triton.cdiv(D, BD))](
        y, order, starts, y if weights is None else weights, out, D, *y.stride(),
        WEIGHTED=weights is not None, ACC=_wide(y), BD=BD,
    )  # fmt: skip
    return out


def spread(
    dout: torch.Tensor, y: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton implementation of `reference_spread`."""
    M, D = y.shape
    weights = weights.contiguous()
    dy, dweights = (
        torch.empty_like(y, memory_format=torch.contiguous_format),
        torch.empty_like(weights),
    )
    if M:
        _spread_kernel[(M,)](
            dout, y, tokens, weights, dy, dweights, D, *dout.stride(), *y.stride(),
            ACC=_wide(y), BD=min(1024, triton.next_power_of_2(max(D, 1))),
        )  # fmt: skip
    return dy, dweights
