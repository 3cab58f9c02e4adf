"""grouped_gemm: rows sorted by group, each group times its own weight (Gale et al. 2022, MegaBlocks)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from xscale_kernels import refusals
from xscale_kernels.select import Implementation, choose


def reference_grouped_gemm(
    x: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """y = x_e @ weights[e]^T for each group e of consecutive rows. Shapes as in `grouped_gemm`."""
    groups = torch.split(x, counts.tolist())
    return torch.cat(
        [F.linear(rows, weight) for rows, weight in zip(groups, weights, strict=True)]
    )  # [M, F]


def reference_forward(x: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Forward product: the same as `grouped_gemm`."""
    return reference_grouped_gemm(x, weights, counts)


def reference_outer(dy: torch.Tensor, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The weights' gradient: dy_e^T @ x_e for each group, zeros for an empty one. [E, F, D]."""
    sizes = counts.tolist()
    pairs = zip(torch.split(dy, sizes), torch.split(x, sizes), strict=True)
    return torch.stack([left.T @ right for left, right in pairs])


def _builtin(x: torch.Tensor, other: torch.Tensor, counts: torch.Tensor) -> str | None:
    if x.shape[0] == 0:
        return "there are no rows"
    if x.device.type == "cpu":
        return "F.grouped_mm does not support float64 on CPU" if x.dtype is torch.float64 else None
    if x.dtype is not torch.bfloat16:
        return f"F.grouped_mm on CUDA needs bfloat16, got {x.dtype}"
    if any(width % 8 for width in (x.shape[-1], *other.shape[1:])):
        return "widths must be multiples of 8 (rows of 16 bytes)"
    if any(tensor.data_ptr() % 16 for tensor in (x, other)):
        return "the tensors must start at a multiple of 16 bytes"
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return "the GPU is older than Ampere"
    return None


_HERE = "xscale_kernels.grouped_gemm"
IMPLEMENTATIONS = (
    Implementation("cpu", f"{_HERE}.cpu", refusals.unless_cpu),
    Implementation("torch", f"{_HERE}.libraries", _builtin, prefix="torch_"),
    Implementation("triton", f"{_HERE}.triton", refusals.unless_triton),
    Implementation("reference", f"{_HERE}.op", refusals.never, prefix="reference_"),
)


@torch.library.custom_op("xscale::grouped_gemm", mutates_args=())
def product(
    x: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, implementation: str
) -> torch.Tensor:
    """`grouped_gemm` without its checks."""
    choice = choose("grouped_gemm", IMPLEMENTATIONS, implementation, x, weights, counts)
    out: torch.Tensor = choice.implementation.function("forward")(x, weights, counts)
    return out


@product.register_fake
def _(
    x: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, implementation: str
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weights.shape[1])


@torch.library.custom_op("xscale::grouped_gemm_outer", mutates_args=())
def outer_product(
    dy: torch.Tensor, x: torch.Tensor, counts: torch.Tensor, implementation: str
) -> torch.Tensor:
    """`reference_outer` by the implementation chosen."""
    choice = choose(
        "grouped_gemm (weights' gradient)", IMPLEMENTATIONS, implementation, dy, x, counts
    )
    out: torch.Tensor = choice.implementation.function("outer")(dy, x, counts)
    return out


@outer_product.register_fake
def _(dy: torch.Tensor, x: torch.Tensor, counts: torch.Tensor, implementation: str) -> torch.Tensor:
    return x.new_empty(counts.shape[0], dy.shape[1], x.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weights, counts, ctx.implementation = inputs
    ctx.save_for_backward(x, weights, counts)


def _backward(
    ctx: Any, dy: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
    x, weights, counts = ctx.saved_tensors
    dy = dy.contiguous()
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = product(dy, weights.transpose(1, 2), counts, ctx.implementation)  # [M, D]
    if ctx.needs_input_grad[1]:
        dw = outer_product(dy, x, counts, ctx.implementation)  # [E, F, D]
    return dx, dw, None, None


product.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.xscale.grouped_gemm)
def _product_flops(x_shape: Any, weights_shape: Any, *_: object, **__: object) -> int:
    return 2 * int(x_shape[0]) * int(weights_shape[1]) * int(weights_shape[2])


@register_flop_formula(torch.ops.xscale.grouped_gemm_outer)
def _outer_flops(dy_shape: Any, x_shape: Any, *_: object, **__: object) -> int:
    return 2 * int(x_shape[0]) * int(x_shape[1]) * int(dy_shape[1])


def grouped_gemm(
    x: torch.Tensor,
    weights: torch.Tensor,
    counts: torch.Tensor | Sequence[int],
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """y_e = x_e @ weights[e]^T for each group e of rows.

    x: [M, D], rows sorted by group. weights: [E, F, D], of x's dtype, laid out as E stacked Linear weights.
    counts: [E] integers, how many rows each group has; zeros are allowed, and they sum to M (checked
    on CPU; on CUDA, where the check would synchronise, rows past the last group are undefined). Returns [M, F].
    Gradients reach x and weights; an empty group's weight gets zeros. On CUDA the host does not wait for the counts.

    Raises ValueError for shapes or dtypes that do not fit, UnusableError when the named implementation refuses.
    """
    if not isinstance(counts, torch.Tensor):
        counts = torch.tensor(counts, dtype=torch.int64)
    if x.dim() != 2 or weights.dim() != 3 or x.shape[1] != weights.shape[2]:
        raise ValueError(
            f"grouped_gemm takes x [M, D] and weights [E, F, D], got {[*x.shape]} and {[*weights.shape]}"
        )
    if counts.shape != weights.shape[:1]:
        raise ValueError(
            f"grouped_gemm takes one count a group: [{weights.shape[0]}], got {[*counts.shape]}"
        )
    if x.dtype != weights.dtype:
        raise ValueError(
            f"x and weights must have one dtype, got {x.dtype} and {weights.dtype}; cast one of them"
        )
    counts = counts.to(x.device, non_blocking=True)
    out: torch.Tensor = product(x, weights, counts, implementation or "")
    return out
