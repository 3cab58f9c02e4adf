"""AdamW in Triton: one launch for all tensors, through a table of their addresses."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xscale_kernels.adamw.hyper import Hyper
from xscale_kernels.adamw.reference import Tensors

BLOCK = 4096


@triton.jit
def _kernel(
    table, tensor_of, first_of, scale, tensors, lr, beta1, beta2, eps, decay, correction1, correction2,
    SCALED: tl.constexpr, P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, ACC: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    which = tl.load(tensor_of + tl.program_id(0))
    at = tl.load(first_of + tl.program_id(0)) + tl.arange(0, BN)
    mask = at < tl.load(table + 4 * tensors + which)
    param = tl.load(table + which).to(tl.pointer_type(P)) + at
    grad = tl.load(table + tensors + which).to(tl.pointer_type(G)) + at
    mean = tl.load(table + 2 * tensors + which).to(tl.pointer_type(M)) + at
    square = tl.load(table + 3 * tensors + which).to(tl.pointer_type(V)) + at
    p = tl.load(param, mask=mask, other=0.0).to(ACC)
    g = tl.load(grad, mask=mask, other=0.0).to(ACC)
    m = tl.load(mean, mask=mask, other=0.0).to(ACC)
    v = tl.load(square, mask=mask, other=0.0).to(ACC)
    if SCALED:
        g *= tl.load(scale).to(ACC)
    m += (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    p -= p * (lr * decay)
    p -= (lr / correction1) * m / (tl.sqrt(v / correction2) + eps)
    tl.store(param, p.to(P), mask=mask)
    tl.store(mean, m.to(M), mask=mask)
    tl.store(square, v.to(V), mask=mask)


def _element(dtype: torch.dtype) -> object:
    return {
        torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16
    }[dtype]  # fmt: skip


def step_(
    params: Tensors, grads: Tensors, means: Tensors, squares: Tensors, scale: torch.Tensor | None, hyper: Hyper
) -> None:
    """As reference.step_."""
    device = params[0].device
    sizes = torch.tensor([each.numel() for each in params])
    blocks = (sizes + BLOCK - 1) // BLOCK
    tensor_of = torch.repeat_interleave(torch.arange(len(params)), blocks)
    first_of = (torch.arange(int(blocks.sum())) - (blocks.cumsum(0) - blocks)[tensor_of]) * BLOCK
    roles = (params, grads, means, squares)
    table = torch.cat([torch.tensor([each.data_ptr() for each in role]) for role in roles] + [sizes])
    table, tensor_of, first_of = (each.to(device) for each in (table, tensor_of, first_of))
    if not tensor_of.numel():
        return
    _kernel[(tensor_of.numel(),)](
        table, tensor_of, first_of, table if scale is None else scale, len(params),
        hyper.lr, hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay, hyper.correction1, hyper.correction2,
        SCALED=scale is not None, ACC=tl.float64 if params[0].dtype is torch.float64 else tl.float32,
        P=_element(params[0].dtype), G=_element(grads[0].dtype), M=_element(means[0].dtype),
        V=_element(squares[0].dtype), BN=BLOCK, num_warps=8,
    )  # fmt: skip
