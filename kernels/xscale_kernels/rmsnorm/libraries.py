"""rmsnorm by kernels of libraries: torch's F.rms_norm (one fused kernel on CUDA), QuACK, Liger and NVIDIA apex."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def torch_rmsnorm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Compute `reference_rmsnorm` by torch's rms_norm."""
    return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)


def apex_rmsnorm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Compute `reference_rmsnorm` by NVIDIA apex's fused RMSNorm."""
    from apex.normalization import fused_layer_norm as apex

    shape = x.shape[-1:]
    if weight is None:
        out: torch.Tensor = apex.fused_rms_norm(x, shape, eps)
    elif weight.dtype == x.dtype:
        out = apex.fused_rms_norm_affine(x, weight, shape, eps)
    else:
        out = apex.mixed_dtype_fused_rms_norm_affine(x, weight, shape, eps)
    return out.to(x.dtype)


def liger_rmsnorm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Compute `reference_rmsnorm` by Liger's Triton kernels (Hsu et al. 2024), if they are installed."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # "gemma" multiplies by the weight before it rounds. In place, the backward would overwrite the gradient of y, which
    # a residual connection still needs.
    offset, in_place = 0.0, False
    out: torch.Tensor = LigerRMSNormFunction.apply(x, weight, eps, offset, "gemma", in_place)
    return out


class _ContiguousGradient(torch.autograd.Function):
    """The identity; its gradient is contiguous."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy.contiguous()


def quack_rmsnorm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Compute `reference_rmsnorm` by QuACK's kernel for Hopper and Blackwell, if it is installed.

    Written from QuACK's source (quack.rmsnorm.rmsnorm) and tested against a stand-in; not run on hardware yet.
    """
    from quack.rmsnorm import rmsnorm

    # Its backward takes views of the gradient.
    out: torch.Tensor = _ContiguousGradient.apply(rmsnorm(x.contiguous(), weight, eps=eps))  # type: ignore[no-untyped-call]
    return out
