"""What a token's loss is made of, beside the logits: said once, for every operator that ends in a softmax."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Terms:
    """loss = lse - (1 - s) * logit[target] - s * mean(logits) + z * lse^2, with lse = log sum exp(logits)."""

    ignore_index: int = -100
    """A token with this target has loss 0 and no gradient."""
    softcap: float = 0.0
    """Above 0, logits are first squashed to softcap * tanh(logits / softcap) (Gemma Team 2024)."""
    z_loss: float = 0.0
    """z above: keeps the normaliser near 1 (Chowdhery et al. 2022, PaLM)."""
    label_smoothing: float = 0.0
    """s above (Szegedy et al. 2016)."""

    def __post_init__(self) -> None:
        if self.softcap < 0 or self.z_loss < 0 or not 0 <= self.label_smoothing < 1:
            raise ValueError(f"softcap and z_loss must be >= 0 and label_smoothing in [0, 1), got {self}")
