"""Gated experts on the CPU in one operator: all three products of a block of rows while it is in the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
ACTIVATIONS: dict[
    str,
    tuple[
        Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ],
] = {
    "glu": (torch.sigmoid, lambda grad, gate: aten.sigmoid_backward(grad, torch.sigmoid(gate))),
    "bilinear": (lambda gate: gate, lambda grad, gate: grad),
    "reglu": (torch.relu, lambda grad, gate: aten.threshold_backward(grad, gate, 0)),
    "geglu": (aten.gelu, lambda grad, gate: aten.gelu_backward(grad, gate)),
    "swiglu": (aten.silu, lambda grad, gate: aten.silu_backward(grad, gate)),
}
"""Kind -> the gate's activation, and its backward (gradient of the output, input) -> gradient of the input."""


def supports(x: torch.Tensor, gate: torch.Tensor, kind: str) -> bool:
    """Whether the operator supports the call and its result does not depend on a row's position in its group."""
    return kind in ACTIVATIONS and rows_bitwise_independent(x, gate)


def _forward_directly(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    counts: torch.Tensor,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    act = ACTIVATIONS[kind][0]
    g, u = x.new_empty(x.shape[0], gate.shape[1]), x.new_empty(x.shape[0], gate.shape[1])  # [M, F]
    y = x.new_empty(x.shape[0], down.shape[1])  # [M, D]
    for group, rows, _ in blocks(counts, g):
        xrows, grows, urows = x[rows], g[rows], u[rows]
        torch.mm(xrows, gate[group].t(), out=grows)
        torch.mm(xrows, up[group].t(), out=urows)
        torch.mm(act(grows) * urows, down[group].t(), out=y[rows])
    return y, g, u


_forward = torch.library.custom_op("xscale::grouped_gated", _forward_directly, mutates_args=())


@_forward.register_fake
def _(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = x.new_empty(x.shape[0], gate.shape[1])
    return x.new_empty(x.shape[0], down.shape[1]), hidden, torch.empty_like(hidden)


@torch.library.custom_op("xscale::grouped_gated_backward", mutates_args=())
def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    g: torch.Tensor,
    u: torch.Tensor,
    counts: torch.Tensor,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    act, act_backward = ACTIVATIONS[kind]
    dx, dgate, dup, ddown = empty_contiguous_like(x, gate, up, down)
    zero_empty_groups(counts, dgate, dup, ddown)
    for group, rows, first in blocks(counts, g):
        grows, urows, xrows, dyrows = g[rows], u[rows], x[rows], dy[rows]
        keep = 0 if first else 1
        activated = act(grows)
        dhidden = dyrows @ down[group]  # [R, F]
        ddown[group].addmm_(dyrows.t(), activated * urows, beta=keep)
        du = dhidden * activated
        dg = act_backward(dhidden.mul_(urows), grows)
        torch.mm(dg, gate[group], out=dx[rows])
        dx[rows].addmm_(du, up[group])
        dgate[group].addmm_(dg.t(), xrows, beta=keep)
        dup[group].addmm_(du.t(), xrows, beta=keep)
    return dx, dgate, dup, ddown


@_backward.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    return empty_contiguous_like(x, gate, up, down)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, gate, up, down, counts, ctx.kind = inputs
    ctx.save_for_backward(x, gate, up, down, output[1], output[2], counts)
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: torch.Tensor | None, *_: object) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return (None,) * 6
    x, gate, up, down, g, u, counts = ctx.saved_tensors
    return (*_backward(dy.contiguous(), x, gate, up, down, g, u, counts, ctx.kind), None, None)


_forward.register_autograd(_gradients, setup_context=_keep)


@register_flop_formula(torch.ops.xscale.grouped_gated)
def _forward_flops(x_shape: Any, gate_shape: Any, *_: object, **__: object) -> int:
    return 6 * int(x_shape[0]) * int(gate_shape[1]) * int(gate_shape[2])


@register_flop_formula(torch.ops.xscale.grouped_gated_backward)
def _backward_flops(dy_shape: Any, x_shape: Any, gate_shape: Any, *_: object, **__: object) -> int:
    return 12 * int(x_shape[0]) * int(gate_shape[1]) * int(gate_shape[2])


def grouped_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    counts: torch.Tensor,
    kind: str,
) -> torch.Tensor:
    """(activation(x_e gate_e^T) * x_e up_e^T) down_e^T for each group e of rows, if `supports` allows it.

    x: [M, D], rows sorted by group. gate, up: [E, F, D], down: [E, D, F], of x's dtype. counts: [E], which sum to M.
    kind: as in gated_activation. Returns [M, D]. Gradients reach x and the weights; an empty group's get zeros.

    Raises ValueError for counts that do not sum to M.
    """
    call = _forward_directly if torch_private.calls_directly(x) else _forward
    y: torch.Tensor = call(x, gate, up, down, counts, kind)[0]
    return y
