"""rmsnorm on the CPU, a block of rows at a time, so that memory is read once in forward and once in backward."""

from __future__ import annotations

from typing import Any

import torch

from xscale_kernels.rows import row_blocks, wide


def forward(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result [N, D] and each row's 1 / rms [N, 1]. x: [N, D]."""
    compute = wide(x.dtype)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rms = x.new_empty(x.shape[0], 1, dtype=compute)
    scale = None if weight is None else weight.to(compute)
    for span in row_blocks(x):
        rows = x[span].to(compute)
        r = (
            torch.linalg.vector_norm(rows, dim=1, keepdim=True)
            .square_()
            .div_(x.shape[1])
            .add_(eps)
            .rsqrt_()
        )
        rms[span] = r
        out = torch.mul(rows, r, out=y[span]) if y.dtype == compute else rows * r
        if scale is not None:
            out.mul_(scale)
        if y.dtype != compute:
            y[span] = out
    return y, rms


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of x [N, D] and of the weight [D]."""
    compute = rms.dtype
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    scale = None if weight is None else weight.to(compute)
    dweight = None if scale is None else torch.zeros_like(scale)
    for span in row_blocks(x):
        unit = x[span] * rms[span]
        g = dy[span].to(compute)
        if scale is not None and dweight is not None:
            dweight.add_((g * unit).sum(0))
            g = g * scale
        along = (g * unit).mean(1, keepdim=True)
        out = torch.addcmul(g, unit, along, value=-1)
        dx[span] = out.mul_(rms[span])
    return dx, None if weight is None or dweight is None else dweight.to(weight.dtype)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        y, rms = forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rms)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        return *backward(dy, *ctx.saved_tensors), None


def rmsnorm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """CPU implementation of `reference_rmsnorm`."""
    out: torch.Tensor = _Rows.apply(x.reshape(-1, x.shape[-1]), weight, eps)  # type: ignore[no-untyped-call]
    return out.view(x.shape)
