"""The gradients of linear_cross_entropy, as every implementation returns them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Gradients(NamedTuple):
    """Gradients of sum(seed * loss), each of its input's dtype."""

    hidden: torch.Tensor
    """[N, D]."""
    weight: torch.Tensor
    """[V, D]."""
    bias: torch.Tensor | None
    """[V], or None where there is no bias."""
