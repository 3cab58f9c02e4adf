"""The definition of layernorm in plain torch, differentiable as it stands."""

from __future__ import annotations

import torch

from xscale_kernels.rows import wide


def layernorm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis, in float32 at least, of x's dtype."""
    rows = x.to(wide(x.dtype))
    rows = rows - rows.mean(-1, keepdim=True)
    y = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(x.dtype)
