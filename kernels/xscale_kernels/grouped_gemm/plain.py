"""Two-layer experts on the CPU in one operator: both products of a block of rows while it is in the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

from xscale_kernels import torch_private
from xscale_kernels.grouped_gemm.blocks import (
    blocks,
    empty_contiguous_like,
    rows_bitwise_independent,
    zero_empty_groups,
)

aten = torch.ops.aten


class Activation(NamedTuple):
    """An element-wise function."""

    call: Callable[[torch.Tensor], torch.Tensor]
    """Applied to the first product."""
    backward: Callable[[torch.Tensor, torch.Tensor], object]
    """Turns the gradient of its output into that of its input, in place, given the saved tensor."""
    keeps: bool = False
    """Whether the backward needs the output, which is saved instead of the input."""


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(
        torch.relu_,
        lambda grad, out: aten.threshold_backward.grad_input(grad, out, 0, grad_input=grad),
        keeps=True,
    ),
    "gelu": Activation(
        aten.gelu, lambda grad, hidden: aten.gelu_backward.grad_input(grad, hidden, grad_input=grad)
    ),
    "gelu_tanh": Activation(
        lambda hidden: aten.gelu(hidden, approximate="tanh"),
        lambda grad, hidden: aten.gelu_backward.grad_input(
            grad, hidden, approximate="tanh", grad_input=grad
        ),
    ),
    "swish": Activation(
        aten.silu, lambda grad, hidden: aten.silu_backward.grad_input(grad, hidden, grad_input=grad)
    ),
    "sigmoid": Activation(
        torch.sigmoid_,
        lambda grad, out: aten.sigmoid_backward.grad_input(grad, out, grad_input=grad),
        keeps=True,
    ),
    "identity": Activation(lambda hidden: hidden, lambda grad, out: grad, keeps=True),
}


def supports(x: torch.Tensor, up: torch.Tensor, kind: str) -> bool:
    """Whether the operator supports the call and its result does not depend on a row's position in its group."""
    return kind in ACTIVATIONS and rows_bitwise_independent(x, up)


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: int, out: torch.Tensor
) -> torch.Tensor:
    if bias is None:
        return torch.mm(x, weight[group].t(), out=out)
    return torch.addmm(bias[group], x, weight[group].t(), out=out)


def _forward_directly(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    counts: torch.Tensor,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    act = ACTIVATIONS[kind].call
    kept = x.new_empty(x.shape[0], up.shape[1])  # [M, F]
    y = x.new_empty(x.shape[0], down.shape[1])  # [M, D]
    for group, rows, _ in blocks(counts, kept):
        hidden = _product(x[rows], up, up_bias, group, kept[rows])
        _product(act(hidden), down, down_bias, group, y[rows])
    return y, kept


_forward = torch.library.custom_op("xscale::grouped_plain", _forward_directly, mutates_args=())


@_forward.register_fake
def _(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape[0], down.shape[1]), x.new_empty(x.shape[0], up.shape[1])


def _sums(up: torch.Tensor, down: torch.Tensor, biased: bool) -> tuple[torch.Tensor, ...]:
    """Zeros that accumulate the biases' gradients; empty without biases."""
    return tuple(weight.new_zeros(weight.shape[:2] if biased else 0) for weight in (up, down))


@torch.library.custom_op("xscale::grouped_plain_backward", mutates_args=())
def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    kept: torch.Tensor,
    counts: torch.Tensor,
    kind: str,
    biased: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    act, act_backward, keeps = ACTIVATIONS[kind]
    dx, dup, ddown = empty_contiguous_like(x, up, down)
    dup_bias, ddown_bias = _sums(up, down, biased)
    zero_empty_groups(counts, dup, ddown)
    for group, rows, first in blocks(counts, kept):
        kept_rows, dyrows = kept[rows], dy[rows]
        keep = 0 if first else 1
        ddown[group].addmm_(dyrows.t(), kept_rows if keeps else act(kept_rows), beta=keep)
        dhidden = dyrows @ down[group]  # [R, F]
        act_backward(dhidden, kept_rows)
        torch.mm(dhidden, up[group], out=dx[rows])
        dup[group].addmm_(dhidden.t(), x[rows], beta=keep)
        if biased:
            dup_bias[group] += dhidden.sum(0)
            ddown_bias[group] += dyrows.sum(0)
    return dx, dup, ddown, dup_bias, ddown_bias


@_backward.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    kept: torch.Tensor,
    counts: torch.Tensor,
    kind: str,
    biased: bool,
) -> tuple[torch.Tensor, ...]:
    return *empty_contiguous_like(x, up, down), *_sums(up, down, biased)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, up, down, up_bias, _, counts, ctx.kind = inputs
    ctx.biased = up_bias is not None
    ctx.save_for_backward(x, up, down, output[1], counts)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: torch.Tensor | None, *_: object) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return (None,) * 7
    x, up, down, kept, counts = ctx.saved_tensors
    dx, dup, ddown, *biases = _backward(
        dy.contiguous(), x, up, down, kept, counts, ctx.kind, ctx.biased
    )
    return (dx, dup, ddown, *(biases if ctx.biased else (None, None)), None, None)


_forward.register_autograd(_gradients, setup_context=_keep)


@register_flop_formula(torch.ops.xscale.grouped_plain)
def _forward_flops(x_shape: Any, up_shape: Any, *_: object, **__: object) -> int:
    return 4 * int(x_shape[0]) * int(up_shape[1]) * int(up_shape[2])


@register_flop_formula(torch.ops.xscale.grouped_plain_backward)
def _backward_flops(dy_shape: Any, x_shape: Any, up_shape: Any, *_: object, **__: object) -> int:
    return 8 * int(x_shape[0]) * int(up_shape[1]) * int(up_shape[2])


def grouped_plain(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    counts: torch.Tensor,
    kind: str,
    *,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation(x_e up_e^T + up_bias_e) down_e^T + down_bias_e for each group e of rows, if `supports` allows it.

    x: [M, D], rows sorted by group. up: [E, F, D], down: [E, D, F], of x's dtype. counts: [E], which sum to M.
    kind: one of ACTIVATIONS. up_bias: [E, F] and down_bias: [E, D], both or neither. Returns [M, D]. Gradients reach x,
    weights and biases; an empty group's get zeros.

    Raises ValueError for counts that do not sum to M, and for one bias without the other.
    """
    if (up_bias is None) != (down_bias is None):
        raise ValueError("grouped_plain takes both biases or neither")
    call = _forward_directly if torch_private.calls_directly(x) else _forward
    y: torch.Tensor = call(x, up, down, up_bias, down_bias, counts, kind)[0]
    return y
