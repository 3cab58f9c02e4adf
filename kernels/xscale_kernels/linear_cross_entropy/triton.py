"""linear_cross_entropy on a GPU: cuBLAS products around a launch that turns a block of logits into its gradient."""

from __future__ import annotations

import torch

from xscale_kernels.cross_entropy import triton as softmax
from xscale_kernels.cross_entropy.terms import Terms
from xscale_kernels.linear_cross_entropy.result import Gradients


def _sweep(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    losses: torch.Tensor,
    lses: torch.Tensor,
    seed: torch.Tensor | None,
    terms: Terms,
    chunk: int,
    known: bool,
) -> Gradients | None:
    (N, D), V = hidden.shape, weight.shape[0]
    block = hidden.new_empty(min(chunk, max(N, 1)), V)
    drows = torch.empty_like(hidden, memory_format=torch.contiguous_format) if seed is not None else None
    # Sums over chunks are kept in float32 at least; a product's result is rounded once before it is added.
    dweight = hidden.new_zeros(V, D, dtype=losses.dtype) if seed is not None else None
    dbias = hidden.new_zeros(V, dtype=losses.dtype) if seed is not None and bias is not None else None
    for start in range(0, N, chunk):
        span = slice(start, min(start + chunk, N))
        rows = hidden[span]
        logits = block[: rows.shape[0]]
        if bias is None:
            torch.mm(rows, weight.t(), out=logits)
        else:
            torch.addmm(bias, rows, weight.t(), out=logits)
        part = None if seed is None else seed[span]
        target = None if seed is None else logits
        softmax.launch(logits, targets[span], losses[span], lses[span], part, target, terms, known)
        if drows is not None and dweight is not None:
            torch.mm(logits, weight, out=drows[span])
            if dweight.dtype == logits.dtype:
                dweight.addmm_(logits.t(), rows)
            else:
                dweight.add_(torch.mm(logits.t(), rows))
        if dbias is not None:
            dbias.add_(logits.sum(0, dtype=dbias.dtype))
    if drows is None or dweight is None:
        return None
    return Gradients(drows, dweight.to(weight.dtype), None if dbias is None else dbias.to(weight.dtype))


def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    seed: torch.Tensor | None,
    terms: Terms,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor, Gradients | None]:
    """As chunked.forward."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    losses, lses = (hidden.new_empty(hidden.shape[0], dtype=wide) for _ in range(2))
    found = _sweep(hidden, weight, bias, targets, losses, lses, seed, terms, chunk, known=False)
    return losses, lses, found


def backward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    lse: torch.Tensor,
    seed: torch.Tensor,
    terms: Terms,
    chunk: int,
) -> Gradients:
    """As chunked.backward."""
    found = _sweep(hidden, weight, bias, targets, lse, lse, seed, terms, chunk, known=True)
    assert found is not None
    return found
