"""bias_dropout_residual: residual + dropout(x + bias), fused (Shoeybi et al. 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from xscale_kernels import refusals
from xscale_kernels.select import Implementation, choose, is_small_call, use_reference


def reference_bias_dropout_residual(
    x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None, p: float
) -> torch.Tensor:
    """residual + dropout(x + bias)."""
    branch = x if bias is None else x + bias
    return residual + (F.dropout(branch, p) if p else branch)


def _large(x: torch.Tensor, p: float, bias: torch.Tensor | None) -> str | None:
    return refusals.unless_large(x) or (None if p else "without dropout plain torch is as fast")


def _several(x: torch.Tensor, p: float, bias: torch.Tensor | None) -> str | None:
    return (
        None
        if p or bias is not None
        else "without bias and dropout it is one sum, which torch does in one pass"
    )


def _triton(x: torch.Tensor, *_: object) -> str | None:
    # The mask's random counter has 32 bits.
    return refusals.unless_triton(x) or (None if x.numel() < 2**31 else "more than 2^31 elements")


_HERE = "xscale_kernels.bias_dropout_residual"
IMPLEMENTATIONS = (
    Implementation("cpu", f"{_HERE}.cpu", refusals.unless_cpu, _large),
    Implementation("triton", f"{_HERE}.triton", _triton, _several),
    Implementation("reference", f"{_HERE}.op", refusals.never, prefix="reference_"),
)


def bias_dropout_residual(
    x: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    p: float = 0.0,
    implementation: str | None = None,
) -> torch.Tensor:
    """residual + dropout(x + bias).

    x, residual: [..., D] of one shape and dtype. bias: [D] of their dtype, or None. p: dropout probability in
    [0, 1); kept elements are scaled by 1 / (1 - p). Pass 0 in evaluation. The mask is drawn from torch's default
    generator of the tensors' device, and differs between implementations. Gradients reach all
    three.

    Raises ValueError for shapes or p that do not fit, UnusableError when the named implementation refuses.
    """
    if (
        x.shape != residual.shape
        or x.dtype != residual.dtype
        or (bias is not None and bias.shape != x.shape[-1:])
    ):
        raise ValueError(
            f"x and residual must have one shape and dtype, got {[*x.shape]} and {[*residual.shape]}"
        )
    if bias is not None and bias.dtype != x.dtype:
        raise ValueError(f"the bias must have x's dtype {x.dtype}, got {bias.dtype}")
    if not 0 <= p < 1:
        raise ValueError(f"the dropout probability p must be in [0, 1), got {p}")
    if use_reference(implementation) or is_small_call(implementation, x):
        return reference_bias_dropout_residual(x, residual, bias, p)
    choice = choose("bias_dropout_residual", IMPLEMENTATIONS, implementation, x, p, bias)
    out: torch.Tensor = choice.implementation.function("bias_dropout_residual")(
        x, residual, bias, p
    )
    return out
