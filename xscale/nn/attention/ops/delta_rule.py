"""The delta rule with and without decay as a recurrence of a sequence (Yang, Kautz and Hatamizadeh 2024, section 3.3).

S_t = exp(d_t) (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T,  o_t = S_t^T q_t
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.nn.attention.ops.dense import upcast
from xscale_kernels.delta_rule.op import delta_rule

CHUNK = 64
"""Tokens of a chunk."""


@dataclass(frozen=True)
class DeltaRule:
    """A sequence of T tokens under the delta rule: a `Recurrence` of the state [B, H, F, K]."""

    q: Tensor
    """[B, H, T, F]."""
    k: Tensor
    """[B, H, T, F]."""
    v: Tensor
    """[B, H, T, K]."""
    strength: Tensor
    """b [B, H, T], the part of the stored value that is replaced."""
    log_decay: Tensor | None = None
    """d [B, H, T] <= 0; None: no decay."""
    documents: Tensor | None = None
    """[B, T]; the state starts from zero where they change. None: one document."""
    kernel: str | None = None
    """Implementation of the operator delta_rule for the outputs; None: the first that can."""

    def outputs_and_state(self, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return o [B, H, T, K] of v's dtype and the last state, given the state of the first token's document."""
        return self._scan(self.v, state, self.kernel)

    def transition(self) -> tuple[Tensor, Tensor]:
        """Return A [B, H, F, F] and E [B, H, F, K]: a state S before the sequence is A S + E after it."""
        width, features = self.v.shape[-1], self.k.shape[-1]
        identity = torch.eye(features, dtype=upcast(self.k).dtype, device=self.k.device)
        # Further columns of the state, to which nothing is written, become A.
        state = F.pad(identity.expand(*self.k.shape[:2], -1, -1), (width, 0))
        _, state = self._scan(F.pad(self.v, (0, features)), state, None)
        return state[..., width:], state[..., :width]

    def _scan(self, v: Tensor, state: Tensor | None, kernel: str | None) -> tuple[Tensor, Tensor]:
        return delta_rule(
            self.q, self.k, v, self.strength, log_decay=self.log_decay, documents=self.documents, state=state,
            chunk=CHUNK, implementation=kernel,
        )  # fmt: skip
