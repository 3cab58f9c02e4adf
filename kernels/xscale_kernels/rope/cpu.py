"""rope on the CPU: rotated block by block into the output; the backward is the inverse rotation."""

from __future__ import annotations

from typing import Any

import torch

from xscale_kernels.rows import row_blocks, wide


def _pair(x: torch.Tensor, R: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return x[..., 0:R:2], x[..., 1:R:2]
    return x[..., : R // 2], x[..., R // 2 : R]


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, direction: float
) -> torch.Tensor:
    """Rotate x by the angles times `direction` (1 or -1). Shapes as in op.py."""
    R, compute = 2 * cos.shape[-1], wide(x.dtype)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    cos, sin = (
        table.to(compute)[..., None, :] for table in (cos, sin)
    )  # [T, 1, R / 2] or [B, T, 1, R / 2]
    sin = sin * direction
    # Sequences shorter than a block share one: with one block each, call overhead dominates.
    for batch in row_blocks(out.flatten(1), least=1):
        c, s = (cos, sin) if cos.dim() == 3 else (cos[batch], sin[batch])
        for span in row_blocks(out[0].flatten(1)):
            rows = x[batch, span].to(compute)  # [b, t, H, K]
            target = out[batch, span] if out.dtype == compute else torch.empty_like(rows)
            (a, b), (to_a, to_b) = _pair(rows, R, interleaved), _pair(target, R, interleaved)
            torch.mul(a, c[..., span, :, :], out=to_a).addcmul_(b, s[..., span, :, :], value=-1)
            torch.mul(b, c[..., span, :, :], out=to_b).addcmul_(a, s[..., span, :, :])
            target[..., R:] = rows[..., R:]
            if out.dtype != compute:
                out[batch, span] = target
    return out


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return rotate(x, cos, sin, interleaved, 1.0)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(dy, cos, sin, ctx.interleaved, -1.0), None, None, None


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """CPU implementation of `reference_rope`."""
    out: torch.Tensor = _Rotation.apply(x, cos, sin, interleaved)  # type: ignore[no-untyped-call]
    return out
