"""Recurrences that are linear in their state, which recurrent mixers compute.

A sequence takes a state S to A S + E. So a shard of a sequence needs no more of the tokens before it than their state,
which the shards before it give by their A and E.
"""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class Recurrence(Protocol):
    """A sequence of tokens with a state [B, H, F, K] that passes from token to token."""

    def outputs_and_state(self, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return o [B, H, T, K] and the state after the sequence, given the state before it; None: zeros.

        The state before it is of the first token's document.
        """
        ...

    def transition(self) -> tuple[Tensor, Tensor]:
        """Return A [B, H, F, F], or [B, H, F, 1] or [B, H, 1, 1] if it is diagonal, and E [B, H, F, K]."""
        ...


def advance_state(matrix: Tensor, state: Tensor) -> Tensor:
    """A S for the A of `Recurrence.transition` and a state S [B, H, F, K]."""
    return matrix * state if matrix.shape[-1] == 1 else matrix @ state


def widened(x: Tensor, width: int) -> Tensor:
    """Append zeros to the last axis up to `width`."""
    return F.pad(x, (0, width - x.shape[-1]))
