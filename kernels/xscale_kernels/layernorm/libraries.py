"""layernorm by torch's F.layer_norm, fused on CPU and CUDA, and by Liger and NVIDIA apex, if they are installed."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from xscale_kernels.rows import wide


def torch_layernorm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Compute `reference_layernorm` by torch's layer_norm."""
    # With parameters of x's dtype, torch on a CPU keeps the rows' statistics in it for the backward pass: in bfloat16
    # the gradient is off by up to 9 % where a row varies little, and by 0.3 % with float32 parameters.
    dtype = wide(x.dtype) if x.is_cpu else x.dtype
    if weight is None and dtype != x.dtype:
        weight = torch.ones(x.shape[-1:], dtype=dtype)
    weight, bias = (
        None if parameter is None else parameter.to(dtype) for parameter in (weight, bias)
    )
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def liger_layernorm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Compute `reference_layernorm` by Liger's Triton kernels (Hsu et al. 2024); it needs weight and bias."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    out: torch.Tensor = LigerLayerNormFunction.apply(x, weight, bias, eps)
    return out


def apex_layernorm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Compute `reference_layernorm` by NVIDIA apex's fused LayerNorm."""
    from apex.normalization import fused_layer_norm as apex

    shape = x.shape[-1:]
    if weight is None or bias is None:
        out: torch.Tensor = apex.fused_layer_norm(x, shape, eps)
    elif weight.dtype == x.dtype:
        out = apex.fused_layer_norm_affine(x, weight, bias, shape, eps)
    else:
        out = apex.mixed_dtype_fused_layer_norm_affine(x, weight, bias, shape, eps)
    return out.to(x.dtype)
