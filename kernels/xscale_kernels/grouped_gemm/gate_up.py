"""The hidden layer of gated experts on a GPU, with gate and up projection as one grouped product.

One product of [E, 2F, D] reads x once, and so does the weights' gradient; the gradient of x is one product over 2F in
place of two results and their sum. The weights are concatenated for it, as they are parameters of their own.
"""

from __future__ import annotations

from typing import Any

import torch

from xscale_kernels.gated_activation import op as activation
from xscale_kernels.grouped_gemm import op
from xscale_kernels.select import choose


def saves_traffic(x: torch.Tensor, gate: torch.Tensor) -> bool:
    """Whether one product moves fewer bytes than two for rows x [M, D] on a GPU and weights [E, F, D].

    Forward and backward save about 6 M D elements (x is read twice less; the gradient of x is written once, and not
    twice, read and summed), and move 12 E F D more (the weights concatenated twice, their gradient copied apart).
    An estimate: no GPU has timed it.
    """
    return x.is_cuda and len(x) >= 2 * gate.shape[0] * gate.shape[1]


class _GateUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        counts: torch.Tensor,
        kind: str,
        choices: tuple[str, str],
    ) -> torch.Tensor:
        both = op.product(x, torch.cat((gate, up), 1), counts, choices[0])  # [M, 2F]
        # Not the concatenated weights: until backward they would be a second copy, beside that which ZeRO-3 frees.
        ctx.save_for_backward(x, gate, up, counts, both)
        ctx.kind, ctx.choices = kind, choices
        forward = choose(
            "gated_activation", activation.IMPLEMENTATIONS, choices[1], both
        ).implementation
        hidden: torch.Tensor = forward.function("halves_forward")(both, kind)  # [M, F]
        return hidden

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dhidden: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, up, counts, both = ctx.saved_tensors
        backward = choose(
            "gated_activation", activation.IMPLEMENTATIONS, ctx.choices[1], both
        ).implementation
        dboth = backward.function("halves_backward")(dhidden, both, ctx.kind)  # [M, 2F]
        dx = dgate = dup = None
        if ctx.needs_input_grad[0]:
            weights = torch.cat((gate, up), 1).transpose(1, 2)
            dx = op.product(dboth, weights, counts, ctx.choices[0])  # [M, D]
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dgate, dup = op.outer_product(dboth, x, counts, ctx.choices[0]).chunk(
                2, 1
            )  # [E, F, D] each
        return dx, dgate, dup, None, None, None


def gate_up_hidden(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    counts: torch.Tensor,
    kind: str,
    *,
    implementation: str | None = None,
    activation_implementation: str | None = None,
) -> torch.Tensor:
    """Compute activation(x_e gate_e^T) * x_e up_e^T for each group e of rows; see `saves_traffic`.

    x: [M, D], rows sorted by group. gate, up: [E, F, D], of x's dtype. counts: [E], which sum to M. kind: as in
    gated_activation. Returns [M, F]. Gradients reach x and the weights; an empty group's get zeros.

    Raises UnusableError when a named implementation, of the product or of the activation, refuses.
    """
    choices = (implementation or "", activation_implementation or "")
    counts = counts.to(x.device, non_blocking=True)
    out: torch.Tensor = _GateUp.apply(x, gate, up, counts, kind, choices)  # type: ignore[no-untyped-call]
    return out
