"""Hyperparameters of AdamW (Loshchilov and Hutter 2017), and what an implementation gets of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class AdamWHyperparameters:
    """Hyperparameters of one AdamW step."""

    step: int
    """Counts from 1."""
    lr: float
    """Step size."""
    beta1: float
    """Decay of the mean."""
    beta2: float
    """Decay of the mean square."""
    eps: float
    """Added to the root of the mean square."""
    weight_decay: float
    """Decoupled: weights shrink by lr * weight_decay."""

    @property
    def correction1(self) -> float:
        """1 - beta1^step."""
        return float(1 - self.beta1**self.step)

    @property
    def correction2(self) -> float:
        """1 - beta2^step."""
        return float(1 - self.beta2**self.step)
