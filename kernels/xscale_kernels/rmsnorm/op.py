"""rmsnorm (Zhang and Sennrich 2019): rows scaled to unit root mean square, times a weight."""

from __future__ import annotations

import torch

from xscale_kernels import refusals
from xscale_kernels.rmsnorm.libraries import torch_rmsnorm
from xscale_kernels.rows import wide
from xscale_kernels.select import Implementation, choose, is_small_call, use_reference


def reference_rmsnorm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32 at least, of x's dtype."""
    rows = x.to(wide(x.dtype))
    y = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.to(y.dtype)).to(x.dtype)


def _triton(x: torch.Tensor, *_: object) -> str | None:
    return refusals.unless_triton(x) or (
        None if x.shape[-1] <= 65536 else "rows are wider than 65536"
    )


def _quack(x: torch.Tensor, *_: object) -> str | None:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not x.numel():
        return "quack needs rows of bfloat16, float16 or float32"
    return refusals.unless_library(x, "quack", (9, 0))


def _liger(x: torch.Tensor, *_: object) -> str | None:
    return refusals.unless_liger(x) or (
        None if x.shape[-1] <= 65536 else "rows are wider than 65536"
    )


def _apex(x: torch.Tensor, *_: object) -> str | None:
    return refusals.unless_apex("fused_layer_norm_cuda", x)


_HERE = "xscale_kernels.rmsnorm"
IMPLEMENTATIONS = (
    Implementation("cpu", f"{_HERE}.cpu", refusals.unless_cpu, refusals.unless_large),
    Implementation("quack", f"{_HERE}.libraries", _quack, prefix="quack_"),
    Implementation("triton", "xscale_kernels.norm_kernels", _triton),
    Implementation("liger", f"{_HERE}.libraries", _liger, prefix="liger_"),
    Implementation("apex", f"{_HERE}.libraries", _apex, prefix="apex_"),
    Implementation("torch", f"{_HERE}.libraries", refusals.never, prefix="torch_"),
    Implementation("reference", f"{_HERE}.op", refusals.never, prefix="reference_"),
)


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32 at least.

    x: [..., D]. weight: [D] of any float dtype, or None. Returns x's shape and dtype. Gradients reach x and weight.

    Raises ValueError for shapes that do not fit, UnusableError when the named implementation refuses.
    """
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rmsnorm takes a weight of the last axis's size {x.shape[-1]}, got {[*weight.shape]}"
        )
    if use_reference(implementation):
        return reference_rmsnorm(x, weight, eps)
    if is_small_call(implementation, x):
        return torch_rmsnorm(x, weight, eps)
    choice = choose("rmsnorm", IMPLEMENTATIONS, implementation, x, weight, eps)
    out: torch.Tensor = choice.implementation.function("rmsnorm")(x, weight, eps)
    return out
