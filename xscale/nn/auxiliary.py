"""Auxiliary losses, attached to the autograd graph where they arise: backward adds their gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        context.weight, context.like = weight, loss.detach()
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return gradient, torch.full_like(context.like, context.weight), None


def mean_over_text(
    values: Tensor,
    real: Tensor | None,
    sum_over_sequence: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Tensor:
    """Mean of values [B, ..., T] over the tokens that are no padding, `real` [B, T]; None: all are.

    `sum_over_sequence` sums over the shards of the sequences, whose ends are padding.
    """
    if real is None:
        return values.mean()
    weights = real.view(len(real), *(1,) * (values.ndim - 2), -1)
    # Not a product: what stands at padding may be no number.
    total, count = (
        values.where(weights, 0.0).sum(),
        (real.sum() * (values.numel() // real.numel())).to(values.dtype),
    )
    return sum_over_sequence(total) / sum_over_sequence(count)


def attach(x: Tensor, loss: Tensor, weight: float | None) -> Tensor:
    """Return `x` with a backward that also runs `weight * loss` backward; `weight` None attaches nothing."""
    if weight is None:
        return x
    attached: Tensor = _Attach.apply(x, loss, weight)  # type: ignore[no-untyped-call]
    return attached
