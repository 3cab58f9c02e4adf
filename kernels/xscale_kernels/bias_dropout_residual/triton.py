"""bias_dropout_residual in Triton: one pass; the mask is a function of a seed and the element index and not saved."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _kept(seed, row, D, p, BD: tl.constexpr):
    """Which of the program's BD columns of a row are kept: four random numbers from each counter of the generator."""
    counter = row * ((D + 3) // 4) + tl.program_id(1) * (BD // 4) + tl.arange(0, BD // 4)
    first, second, third, fourth = tl.rand4x(tl.load(seed), counter)
    draws = tl.reshape(tl.join(tl.join(first, second), tl.join(third, fourth)), (BD,))
    return draws >= p


@triton.jit
def _forward_kernel(
    x, residual, bias, seed, out, D, sx, sr, p,
    BIASED: tl.constexpr, DROPS: tl.constexpr, ACC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BD + tl.arange(0, BD)
    mask = columns < D
    value = tl.load(x + row * sx + columns, mask=mask, other=0.0).to(ACC)
    if BIASED:
        value += tl.load(bias + columns, mask=mask, other=0.0).to(ACC)
    if DROPS:
        value = tl.where(_kept(seed, row, D, p, BD), value / (1 - p), 0.0)
    value += tl.load(residual + row * sr + columns, mask=mask, other=0.0).to(ACC)
    tl.store(out + row * D + columns, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(dy, seed, dx, D, sy, p, ACC: tl.constexpr, BD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BD + tl.arange(0, BD)
    mask = columns < D
    value = tl.load(dy + row * sy + columns, mask=mask, other=0.0).to(ACC)
    value = tl.where(_kept(seed, row, D, p, BD), value / (1 - p), 0.0)
    tl.store(dx + row * D + columns, value.to(dx.dtype.element_ty), mask=mask)


def _unit_stride(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None, p: float
    ) -> torch.Tensor:
        x, residual = _unit_stride(x), _unit_stride(residual)
        bias = None if bias is None else bias.contiguous()
        N, D = x.shape
        out = residual.new_empty(N, D)
        # Drawn on the device from torch's generator: no synchronisation, and recomputation draws the same mask.
        seed = torch.randint(2**31 - 1, (1,), device=x.device)
        if out.numel():
            _forward_kernel[(N, triton.cdiv(D, BLOCK))](
                x, residual, x if bias is None else bias, seed, out, D, x.stride(0), residual.stride(0), p,
                BIASED=bias is not None, DROPS=p > 0,
                ACC=tl.float64 if x.dtype is torch.float64 else tl.float32, BD=BLOCK,
            )  # fmt: skip
        ctx.save_for_backward(seed)
        ctx.p, ctx.bias_dtype = p, None if bias is None else bias.dtype
        return out

    @staticmethod
    def backward(
        ctx: Any, dy: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None]:
        dx = dy
        if ctx.p and dy.numel():
            (seed,) = ctx.saved_tensors
            rows = _unit_stride(dy)
            N, D = rows.shape
            dx = rows.new_empty(N, D)
            _backward_kernel[(N, triton.cdiv(D, BLOCK))](
                rows, seed, dx, D, rows.stride(0), ctx.p,
                ACC=tl.float64 if dy.dtype is torch.float64 else tl.float32, BD=BLOCK,
            )  # fmt: skip
        return dx, dy, None if ctx.bias_dtype is None else dx.sum(0).to(ctx.bias_dtype), None


def bias_dropout_residual(
    x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None, p: float
) -> torch.Tensor:
    """Triton implementation of `reference_bias_dropout_residual`."""
    rows = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, residual))
    out: torch.Tensor = _Sum.apply(*rows, bias, p)  # type: ignore[no-untyped-call]
    return out.view(x.shape)
