"""The numbers of one AdamW step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hyper:
    """What every tensor of the step shares."""

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
