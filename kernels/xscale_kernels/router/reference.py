"""The definition of route in plain torch, differentiable as it stands."""

from __future__ import annotations

import torch

from xscale_kernels.router.slots import slots
from xscale_kernels.rows import wide

__all__ = ["SCORES", "route", "slots"]

SCORES = ("softmax", "sigmoid")


def route(
    logits: torch.Tensor, k: int, bias: torch.Tensor | None, score: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores [N, E], the chosen ones' scores [N, k] and the choice [N, k], best first. Shapes as in op.py."""
    rows = logits.to(wide(logits.dtype))
    scores = rows.softmax(-1) if score == "softmax" else rows.sigmoid()
    ranked = scores.detach() if bias is None else scores.detach() + bias
    # Of equal scores the maximum is the first; topk does not say which it takes.
    experts = ranked.max(-1, keepdim=True).indices if k == 1 else ranked.topk(k, dim=-1).indices
    return scores, scores.gather(-1, experts), experts
