"""AdamW in Triton: one launch for all tensors, through a table of their addresses."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xscale_kernels.adamw.hyperparameters import AdamWHyperparameters, Tensors
from xscale_kernels.tensor_table import TensorTable
from xscale_kernels.triton_runtime import element

BLOCK = 2048


@triton.jit
def _update(
    param, grad, mean, square, mask, g_scale, lr, beta1, beta2, eps, decay, correction1, correction2,
    P: tl.constexpr, M: tl.constexpr, V: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Step the elements at four blocks of pointers; mask is None where the block is whole."""
    p = tl.load(param, mask=mask).to(ACC)
    g = tl.load(grad, mask=mask).to(ACC) * g_scale
    m = tl.load(mean, mask=mask).to(ACC)
    v = tl.load(square, mask=mask).to(ACC)
    m += (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    p -= p * (lr * decay)
    p -= (lr / correction1) * m / (tl.sqrt(v / correction2) + eps)
    tl.store(param, p.to(P), mask=mask)
    tl.store(mean, m.to(M), mask=mask)
    tl.store(square, v.to(V), mask=mask)


@triton.jit
def _pointer(table, index, first, T: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer to an element of a tensor; blocks begin at multiples of 16 bytes if their tensors do."""
    pointer = tl.load(table + index).to(tl.pointer_type(T)) + first
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _kernel(
    table, tensor_of, first_of, scale, tensors, lr, beta1, beta2, eps, decay, correction1, correction2,
    SCALED: tl.constexpr, P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, ACC: tl.constexpr,
    ALIGNED: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    which = tl.load(tensor_of + tl.program_id(0))
    first = tl.load(first_of + tl.program_id(0))
    left = tl.load(table + 4 * tensors + which) - first
    at = tl.arange(0, BN)
    param = _pointer(table, which, first, P, ALIGNED) + at
    grad = _pointer(table, tensors + which, first, G, ALIGNED) + at
    mean = _pointer(table, 2 * tensors + which, first, M, ALIGNED) + at
    square = _pointer(table, 3 * tensors + which, first, V, ALIGNED) + at
    g_scale = tl.load(scale).to(ACC) if SCALED else 1.0
    # A mask prevents vectorised access, so only a tensor's last block has one.
    if left >= BN:
        _update(
            param, grad, mean, square, None, g_scale, lr, beta1, beta2, eps, decay, correction1, correction2,
            P, M, V, ACC,
        )  # fmt: skip
    else:
        _update(
            param, grad, mean, square, at < left, g_scale, lr, beta1, beta2, eps, decay, correction1, correction2,
            P, M, V, ACC,
        )  # fmt: skip


def step_(
    params: Tensors,
    grads: Tensors,
    means: Tensors,
    squares: Tensors,
    scale: torch.Tensor | None,
    hyper: AdamWHyperparameters,
) -> None:
    """Triton implementation of `reference_step_`."""
    table = TensorTable.of((params, grads, means, squares), BLOCK)
    if not table.blocks:
        return
    _kernel[(table.blocks,)](
        table.numbers, table.tensor_of, table.first_of, table.numbers if scale is None else scale, table.tensors,
        hyper.lr, hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay, hyper.correction1, hyper.correction2,
        SCALED=scale is not None, ACC=tl.float64 if params[0].dtype is torch.float64 else tl.float32,
        P=element(params[0].dtype), G=element(grads[0].dtype), M=element(means[0].dtype),
        V=element(squares[0].dtype), ALIGNED=table.aligned, BN=BLOCK, num_warps=8,
    )  # fmt: skip
