"""linear_cross_entropy on a GPU: cuBLAS products around a launch that turns a block of logits into its gradient."""

from __future__ import annotations

import torch

from xscale_kernels.cross_entropy import triton as softmax
from xscale_kernels.cross_entropy.terms import Terms
from xscale_kernels.linear_cross_entropy.chunked import Head, sweep
from xscale_kernels.linear_cross_entropy.result import Gradients


def _sweep(
    head: Head,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    lses: torch.Tensor,
    seed: torch.Tensor | None,
    terms: Terms,
    chunk: int,
    known: bool,
) -> torch.Tensor:
    def turn(logits: torch.Tensor, span: slice) -> torch.Tensor | None:
        part, block = (None, None) if seed is None else (seed[span], logits)
        softmax.launch(logits, targets[span], losses[span], lses[span], part, block, terms, known)
        return block

    return sweep(head, hidden, chunk, turn)


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
    head = Head(weight, bias, min(chunk, max(hidden.shape[0], 1)))
    losses, lses = (hidden.new_empty(hidden.shape[0], dtype=head.wide) for _ in range(2))
    drows = _sweep(head, hidden, targets, losses, lses, seed, terms, chunk, known=False)
    return losses, lses, None if seed is None else head.gradients(drows, weight, bias)


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
    head = Head(weight, bias, min(chunk, max(hidden.shape[0], 1)))
    drows = _sweep(head, hidden, targets, lse, lse, seed, terms, chunk, known=True)
    return head.gradients(drows, weight, bias)
