"""route: a token's scores over the experts and its k best (Shazeer et al. 2017; the bias: Wang et al. 2024)."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from xscale_kernels import refusals
from xscale_kernels.router import reference
from xscale_kernels.select import Implementation, choose, plain


def _triton(logits: torch.Tensor, k: int) -> str | None:
    return refusals.unless_triton(logits) or (None if logits.shape[1] <= 4096 and k <= 32 else "E > 4096 or k > 32")


_HERE = "xscale_kernels.router"
IMPLEMENTATIONS = (
    Implementation("triton", f"{_HERE}.triton", _triton),
    Implementation("reference", f"{_HERE}.reference", refusals.never),
)


class Routed(NamedTuple):
    """Where tokens go, in float32 (float64 for float64 logits)."""

    scores: torch.Tensor
    """[N, E], for balance losses; carries gradient."""
    weights: torch.Tensor
    """[N, k], best first; carries gradient."""
    experts: torch.Tensor
    """[N, k] int64."""
    places: torch.Tensor | None
    """[N, k] int64, with `capacity` only: the place in the expert's buffer; from C on it is dropped (weight 0)."""
    counts: torch.Tensor | None
    """[E] int64, assignments to each expert before any is dropped, with `capacity` only."""


def route(
    logits: torch.Tensor,
    k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    bias: torch.Tensor | None = None,
    renormalise: bool = False,
    capacity: int | None = None,
    order: Literal["choice", "token"] = "choice",
    implementation: str | None = None,
) -> Routed:
    """Scores of logits [N, E] and the k best experts of each token.

    score: over all experts ("softmax") or each by itself ("sigmoid"). bias: [E], added to the scores for choosing only.
    renormalise: scales a token's k weights to sum to 1. capacity: how many assignments an expert takes; the order in
    which they are taken is `slots`' order.

    Raises ValueError for a k or a score that cannot be, UnusableError when the named implementation refuses.
    """
    if logits.dim() != 2 or not 1 <= k <= logits.shape[1]:
        raise ValueError(f"route takes logits [N, E] and k from 1 to E, got {[*logits.shape]} and k = {k}")
    if score not in reference.SCORES:
        raise ValueError(f"route has no score '{score}'; there are: {', '.join(reference.SCORES)}")
    chosen: Any = reference
    if not plain(implementation):
        chosen = choose("router", IMPLEMENTATIONS, implementation, logits, k).implementation.load()
    scores, weights, experts = chosen.route(logits, k, bias, score)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    if capacity is None:
        return Routed(scores, weights, experts, None, None)
    places, counts = chosen.slots(experts, logits.shape[1], order=order)
    return Routed(scores, weights * (places < capacity), experts, places, counts)
