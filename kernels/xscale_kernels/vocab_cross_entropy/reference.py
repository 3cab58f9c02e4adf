"""The definition of the local parts of a vocabulary-parallel loss, with all local logits at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from xscale_kernels.cross_entropy.terms import Terms
from xscale_kernels.linear_cross_entropy.result import Gradients

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, terms: Terms
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Capped logits [N, V_local] in float32 at least, and the cap's slope."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if not terms.softcap:
        return logits, None
    squashed = torch.tanh(logits / terms.softcap)
    return terms.softcap * squashed, 1 - squashed.square()


def _pull(targets: torch.Tensor, first: int, like: torch.Tensor, terms: Terms) -> torch.Tensor:
    """[N, V_local]: 1 at a token's target where that is here."""
    words = torch.arange(first, first + like.shape[1], device=like.device)
    return ((targets[:, None] == words) & (targets != terms.ignore_index)[:, None]).to(like.dtype)


def statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    first: int,
    terms: Terms,
    chunk: int,
) -> Three:
    """lse, picked and total, each [N]. Shapes as in op.py."""
    logits, _ = _logits(hidden, weight, bias, terms)
    kept = targets != terms.ignore_index
    picked = (logits * _pull(targets, first, logits, terms)).sum(1)
    total = logits.sum(1) if terms.label_smoothing else torch.zeros_like(picked)
    return logits.logsumexp(1).where(kept, 0), picked, total.where(kept, 0)


def gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    first: int,
    lse: torch.Tensor,
    seed: torch.Tensor,
    words: int,
    terms: Terms,
    chunk: int,
) -> Gradients:
    """Of sum(seed * loss), through this rank's words."""
    logits, slope = _logits(hidden, weight, bias, terms)
    kept = targets != terms.ignore_index
    scale = torch.where(kept, seed.to(lse.dtype), 0)[:, None]
    lse = lse.where(kept, 0)[:, None]
    out = (logits - lse).exp() * (1 + 2 * terms.z_loss * lse)
    out = out - (1 - terms.label_smoothing) * _pull(targets, first, logits, terms) - terms.label_smoothing / words
    out = (out * scale).where(kept[:, None], 0)
    narrow = (out if slope is None else out * slope).to(hidden.dtype)
    return Gradients(narrow @ weight, narrow.t() @ hidden, None if bias is None else narrow.sum(0).to(bias.dtype))
