"""The definition of rope in plain torch, differentiable as it stands."""

from __future__ import annotations

import torch

from xscale_kernels.rows import wide


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotates the first R channels of each head in pairs; computed in float32 at least. Shapes as in op.py."""
    R = 2 * cos.shape[-1]
    cos, sin = (each.to(wide(x.dtype)).unsqueeze(-2) for each in (cos, sin))  # [T, 1, R / 2] or [B, T, 1, R / 2]
    turned, rest = x[..., :R].to(cos.dtype), x[..., R:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((out.to(x.dtype), rest), -1) if rest.shape[-1] else out.to(x.dtype)
