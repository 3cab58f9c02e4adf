"""gated_activation in Triton: one pass forward, one backward; the backward recomputes the activation."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _activation(gate, KIND: tl.constexpr):
    """Value and derivative of the activation."""
    if KIND == "glu":
        value = 1 / (1 + tl.exp(-gate))
        slope = value * (1 - value)
    elif KIND == "bilinear":
        value = gate
        slope = tl.full(gate.shape, 1.0, gate.dtype)
    elif KIND == "reglu":
        value = tl.where(gate > 0, gate, 0.0)
        slope = tl.where(gate > 0, 1.0, 0.0)
    elif KIND == "swiglu":
        sigmoid = 1 / (1 + tl.exp(-gate))
        value = gate * sigmoid
        slope = sigmoid * (1 + gate * (1 - sigmoid))
    elif KIND == "quick_geglu":
        sigmoid = 1 / (1 + tl.exp(-1.702 * gate))
        value = gate * sigmoid
        slope = sigmoid * (1 + 1.702 * gate * (1 - sigmoid))
    elif KIND == "geglu":
        share = 0.5 * (1 + tl.erf(gate * 0.7071067811865476))
        value = gate * share
        slope = share + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        tanh = 1 - 2 / (tl.exp(2 * inner) + 1)
        value = 0.5 * gate * (1 + tanh)
        slope = 0.5 * (1 + tanh) + 0.5 * gate * (1 - tanh * tanh) * 0.7978845608028654 * (
            1 + 0.134145 * gate * gate
        )
    return value, slope


@triton.jit
def _forward_kernel(
    gate, up, out, F, sg, su, KIND: tl.constexpr, ACC: tl.constexpr, BF: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BF + tl.arange(0, BF)
    mask = columns < F
    g = tl.load(gate + row * sg + columns, mask=mask, other=0.0).to(ACC)
    u = tl.load(up + row * su + columns, mask=mask, other=0.0).to(ACC)
    value, _ = _activation(g, KIND)
    tl.store(out + row * F + columns, (value * u).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy, gate, up, dgate, dup, F, sy, sg, su, sdg, sdu, KIND: tl.constexpr, ACC: tl.constexpr, BF: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BF + tl.arange(0, BF)
    mask = columns < F
    d = tl.load(dy + row * sy + columns, mask=mask, other=0.0).to(ACC)
    g = tl.load(gate + row * sg + columns, mask=mask, other=0.0).to(ACC)
    u = tl.load(up + row * su + columns, mask=mask, other=0.0).to(ACC)
    value, slope = _activation(g, KIND)
    tl.store(dup + row * sdu + columns, (d * value).to(dup.dtype.element_ty), mask=mask)
    tl.store(dgate + row * sdg + columns, (d * u * slope).to(dgate.dtype.element_ty), mask=mask)


def _settings(gate: torch.Tensor, kind: str) -> dict[str, object]:
    return {
        "KIND": kind,
        "ACC": tl.float64 if gate.dtype is torch.float64 else tl.float32,
        "BF": BLOCK,
    }


def _unit_stride(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        gate, up = _unit_stride(gate), _unit_stride(up)
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return _forward(gate, up, kind)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
        _backward_into(dgate, dup, dy, gate, up, ctx.kind)
        return dgate, dup, None


def _forward(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    N, F = gate.shape
    out = gate.new_empty(N, F)
    if out.numel():
        grid = (N, triton.cdiv(F, BLOCK))
        _forward_kernel[grid](
            gate, up, out, F, gate.stride(0), up.stride(0), **_settings(gate, kind)
        )
    return out


def _backward_into(
    dgate: torch.Tensor,
    dup: torch.Tensor,
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    kind: str,
) -> None:
    dy = _unit_stride(dy)
    N, F = gate.shape
    if dgate.numel():
        strides = (tensor.stride(0) for tensor in (dy, gate, up, dgate, dup))
        _backward_kernel[(N, triton.cdiv(F, BLOCK))](
            dy, gate, up, dgate, dup, F, *strides, **_settings(gate, kind)
        )


def gated_activation(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """Triton implementation of `reference_gated_activation`."""
    rows = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (gate, up))
    out: torch.Tensor = _Gated.apply(*rows, kind)  # type: ignore[no-untyped-call]
    return out.view(gate.shape)


def halves_forward(both: torch.Tensor, kind: str) -> torch.Tensor:
    """Triton implementation of `reference_halves_forward`."""
    gate, up = both.chunk(2, -1)
    return _forward(gate, up, kind)


def halves_backward(dy: torch.Tensor, both: torch.Tensor, kind: str) -> torch.Tensor:
    """Triton implementation of `reference_halves_backward`; both halves are written where they stay."""
    gradient = torch.empty_like(both)
    (dgate, dup), (gate, up) = gradient.chunk(2, -1), both.chunk(2, -1)
    _backward_into(dgate, dup, dy, gate, up, kind)
    return gradient
