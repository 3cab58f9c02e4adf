"""What attention does beside its layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rule:
    """score = cap(scale * q k) - slope * |distance|, hidden by order and by documents."""

    scale: float
    """Multiplies q k."""
    causal: bool
    """Query t sees keys up to t + S - T: the last query is at the last key."""
    softcap: float = 0.0
    """Above 0, scores are squashed to softcap * tanh(score / softcap)."""
    slopes: torch.Tensor | None = None
    """[H] float32: ALiBi (Press et al. 2021)."""
    query_documents: torch.Tensor | None = None
    """[B, T] int: a query sees keys of its own document only."""
    key_documents: torch.Tensor | None = None
    """[B, S] int."""
