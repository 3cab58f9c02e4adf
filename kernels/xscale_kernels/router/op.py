"""route: router scores of each token and its top-k experts (Shazeer et al. 2017; the bias: Wang et al. 2024)."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from xscale_kernels import refusals
from xscale_kernels.rows import wide
from xscale_kernels.select import Implementation, choose, is_small_call, use_reference

SCORES = ("softmax", "sigmoid")


def reference_route(
    logits: torch.Tensor, k: int, bias: torch.Tensor | None, score: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scores [N, E], scores of the chosen experts [N, k] and their indices [N, k], best first."""
    rows = logits.to(wide(logits.dtype))
    scores = rows.softmax(-1) if score == "softmax" else rows.sigmoid()
    ranked = scores.detach() if bias is None else scores.detach() + bias
    # max takes the first of equal scores; topk does not specify which.
    experts = ranked.max(-1, keepdim=True).indices if k == 1 else ranked.topk(k, dim=-1).indices
    return scores, scores.gather(-1, experts), experts


def slots(
    experts: torch.Tensor, E: int, *, order: Literal["choice", "token"] = "choice"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Position of each assignment in its expert's buffer, and assignments per expert (Lepikhin et al. 2020).

    experts: [N, k] int64 in [0, E). order: "choice" puts all tokens' first choices before any second
    choice (GShard); "token" puts all choices of a token before the next token. Returns positions [N, k] int64 (an
    assignment fits capacity C if its position is < C) and counts [E] int64. It is one stable sort: no tensor of size
    N x E, and no device synchronisation.
    """
    flat = (experts.t() if order == "choice" else experts).reshape(-1)  # [M]
    ordered, at = flat.sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(E + 1, device=flat.device))  # [E + 1]
    ranks = torch.arange(flat.shape[0], device=flat.device) - bounds[ordered]
    places = torch.empty_like(ranks).scatter_(0, at, ranks)
    shape = experts.t().shape if order == "choice" else experts.shape
    places = places.view(shape)
    return (places.t() if order == "choice" else places).contiguous(), bounds.diff()


def _triton(logits: torch.Tensor, k: int) -> str | None:
    return refusals.unless_triton(logits) or (
        None if logits.shape[1] <= 4096 and k <= 32 else "E > 4096 or k > 32"
    )


_HERE = "xscale_kernels.router"
IMPLEMENTATIONS = (
    Implementation("triton", f"{_HERE}.triton", _triton),
    Implementation("reference", f"{_HERE}.op", refusals.never, prefix="reference_"),
)


class Routed(NamedTuple):
    """Routing of N tokens, in float32 (float64 for float64 logits)."""

    scores: torch.Tensor
    """[N, E], for load-balancing losses; has a gradient."""
    weights: torch.Tensor
    """[N, k], best first; has a gradient."""
    experts: torch.Tensor
    """[N, k] int64."""
    places: torch.Tensor | None
    """[N, k] int64, with `capacity` only: position in the expert's buffer; dropped (weight 0) if >= capacity."""
    counts: torch.Tensor | None
    """[E] int64, with `capacity` only: assignments of each expert before dropping."""


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
    """Compute scores of logits [N, E] and the top-k experts of each token.

    score: "softmax" over the experts or "sigmoid" of each. bias: [E], added to the scores for the choice only.
    renormalise: scales a token's k weights to sum to 1. capacity: assignments that an expert accepts, in the order of
    `slots`.

    Raises ValueError for an invalid k or score, UnusableError when the named implementation refuses.
    """
    if logits.dim() != 2 or not 1 <= k <= logits.shape[1]:
        raise ValueError(
            f"route takes logits [N, E] and k from 1 to E, got {[*logits.shape]} and k = {k}"
        )
    if score not in SCORES:
        raise ValueError(f"route has no score '{score}'; there are: {', '.join(SCORES)}")
    compute_route: Any = reference_route
    compute_slots: Any = slots
    if not use_reference(implementation) and not is_small_call(implementation, logits):
        chosen = choose("router", IMPLEMENTATIONS, implementation, logits, k).implementation
        if chosen.name != "reference":
            compute_route, compute_slots = chosen.function("route"), chosen.function("slots")
    scores, weights, experts = compute_route(logits, k, bias, score)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    if capacity is None:
        return Routed(scores, weights, experts, None, None)
    places, counts = compute_slots(experts, logits.shape[1], order=order)
    return Routed(scores, weights * (places < capacity), experts, places, counts)
