"""layernorm (Ba et al. 2016): rows with mean 0 and variance 1, times a weight, plus a bias."""

from __future__ import annotations

import torch

from xscale_kernels import refusals
from xscale_kernels.layernorm.libraries import torch_layernorm
from xscale_kernels.rows import wide
from xscale_kernels.select import Implementation, choose, is_small_call, use_reference


def reference_layernorm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis, in float32 at least, of x's dtype."""
    rows = x.to(wide(x.dtype))
    rows = rows - rows.mean(-1, keepdim=True)
    y = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(x.dtype)


def _triton(x: torch.Tensor, *_: object) -> str | None:
    return refusals.unless_triton(x) or (
        None if x.shape[-1] <= 65536 else "rows are wider than 65536"
    )


def _liger(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *_: object
) -> str | None:
    if weight is None or bias is None:
        return "liger needs both weight and bias"
    return refusals.unless_liger(x) or (
        None if x.shape[-1] <= 65536 else "rows are wider than 65536"
    )


def _apex(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *_: object
) -> str | None:
    reason = refusals.unless_apex("fused_layer_norm_cuda", x)
    return reason or (
        None
        if (weight is None) == (bias is None)
        else "apex needs both weight and bias, or neither"
    )


_HERE = "xscale_kernels.layernorm"
IMPLEMENTATIONS = (
    Implementation("triton", "xscale_kernels.norm_kernels", _triton),
    Implementation("liger", f"{_HERE}.libraries", _liger, prefix="liger_"),
    Implementation("apex", f"{_HERE}.libraries", _apex, prefix="apex_"),
    Implementation("torch", f"{_HERE}.libraries", refusals.never, prefix="torch_"),
    Implementation("reference", f"{_HERE}.op", refusals.never, prefix="reference_"),
)


def layernorm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float = 1e-5,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last axis, computed in float32 at least.

    x: [..., D]. weight, bias: [D] of any float dtype, or None. Returns x's shape and dtype. Gradients reach all three.
    On CPU F.layer_norm comes first: it is one fused pass in forward and one in backward.

    Raises ValueError for shapes that do not fit, UnusableError when the named implementation refuses.
    """
    if any(
        parameter is not None and parameter.shape != x.shape[-1:] for parameter in (weight, bias)
    ):
        raise ValueError(
            f"layernorm takes a weight and a bias of the last axis's size {x.shape[-1]}"
        )
    if use_reference(implementation):
        return reference_layernorm(x, weight, bias, eps)
    if is_small_call(implementation, x):
        return torch_layernorm(x, weight, bias, eps)
    choice = choose("layernorm", IMPLEMENTATIONS, implementation, x, weight, bias, eps)
    out: torch.Tensor = choice.implementation.function("layernorm")(x, weight, bias, eps)
    return out
