"""gated_activation (Dauphin et al. 2016, Shazeer 2020): activation(gate) * up, the hidden layer of a gated FFN."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from xscale_kernels import refusals
from xscale_kernels.select import Implementation, choose, is_small_call, use_reference

KINDS = ("glu", "bilinear", "reglu", "geglu", "geglu_tanh", "quick_geglu", "swiglu")


def activate(gate: torch.Tensor, kind: str) -> torch.Tensor:
    """Apply the gate's activation: sigmoid, none, ReLU, GELU (exact, by tanh or by a sigmoid) or SiLU."""
    if kind == "glu":
        return torch.sigmoid(gate)
    if kind == "bilinear":
        return gate
    if kind == "reglu":
        return F.relu(gate)
    if kind == "swiglu":
        return F.silu(gate)
    if kind == "quick_geglu":
        return gate * torch.sigmoid(1.702 * gate)
    return F.gelu(gate, approximate="tanh" if kind == "geglu_tanh" else "none")


def reference_gated_activation(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """activation(gate) * up."""
    return activate(gate, kind) * up


def reference_halves_forward(both: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute activation(gate) * up, [N, F], where `both` [N, 2F] is gate and up side by side."""
    gate, up = both.chunk(2, -1)
    return reference_gated_activation(gate, up, kind)


def reference_halves_backward(dy: torch.Tensor, both: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute the gradient [N, 2F] of `both`, given that of the output, dy [N, F]."""
    with torch.enable_grad():
        leaf = both.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(reference_halves_forward(leaf, kind), leaf, dy)
    return gradient


_HERE = "xscale_kernels.gated_activation"
IMPLEMENTATIONS = (
    Implementation("triton", f"{_HERE}.triton", refusals.unless_triton),
    Implementation("reference", f"{_HERE}.op", refusals.never, prefix="reference_"),
)


def gated_activation(
    gate: torch.Tensor, up: torch.Tensor, kind: str, *, implementation: str | None = None
) -> torch.Tensor:
    """activation(gate) * up, element by element.

    gate, up: [..., F] of one shape and dtype; they may be the two halves of one tensor. kind: "glu" (sigmoid),
    "bilinear" (none), "reglu", "geglu" (exact), "geglu_tanh", "quick_geglu" (x sigmoid(1.702 x), Hendrycks
    and Gimpel 2016), "swiglu". Returns their shape and dtype. Gradients reach both.

    Raises ValueError for an unknown kind or shapes that differ, UnusableError when the named implementation refuses.
    """
    if kind not in KINDS:
        raise ValueError(f"gated_activation has no kind '{kind}'; there are: {', '.join(KINDS)}")
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate and up must have one shape and dtype, got {[*gate.shape]} and {[*up.shape]}"
        )
    if use_reference(implementation):
        return reference_gated_activation(gate, up, kind)
    if is_small_call(implementation, gate):
        return reference_gated_activation(gate, up, kind)
    choice = choose("gated_activation", IMPLEMENTATIONS, implementation, gate)
    out: torch.Tensor = choice.implementation.function("gated_activation")(gate, up, kind)
    return out
