"""gated_activation on the CPU: blocks of rows, and a backward that makes the activation again instead of keeping it."""

from __future__ import annotations

from typing import Any

import torch

from xscale_kernels.gated_activation.reference import activate
from xscale_kernels.rows import row_blocks


def _slope(grad: torch.Tensor, gate: torch.Tensor, kind: str) -> torch.Tensor:
    """grad times the activation's derivative at gate."""
    aten = torch.ops.aten
    out: torch.Tensor = grad
    if kind == "glu":
        out = aten.sigmoid_backward(grad, torch.sigmoid(gate))
    elif kind == "reglu":
        out = aten.threshold_backward(grad, gate, 0)
    elif kind == "swiglu":
        out = aten.silu_backward(grad, gate)
    elif kind != "bilinear":
        out = aten.gelu_backward(grad, gate, approximate="tanh" if kind == "geglu_tanh" else "none")
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        out = gate.new_empty(gate.shape)
        for span in row_blocks(out):
            torch.mul(activate(gate[span], kind), up[span], out=out[span])
        return out

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
        for span in row_blocks(dgate):
            torch.mul(activate(gate[span], ctx.kind), dy[span], out=dup[span])
            dgate[span] = _slope(dy[span] * up[span], gate[span], ctx.kind)
        return dgate, dup, None


def gated_activation(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """As reference.gated_activation."""
    rows = (each.reshape(-1, each.shape[-1]) for each in (gate, up))
    out: torch.Tensor = _Gated.apply(*rows, kind)  # type: ignore[no-untyped-call]
    return out.view(gate.shape)
