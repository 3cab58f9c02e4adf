"""The definition of rmsnorm in plain torch, differentiable as it stands."""

from __future__ import annotations

import torch

from xscale_kernels.rows import wide


def rmsnorm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32 at least, of x's dtype."""
    rows = x.to(wide(x.dtype))
    y = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.to(y.dtype)).to(x.dtype)
