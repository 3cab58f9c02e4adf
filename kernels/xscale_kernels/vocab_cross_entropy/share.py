"""What one rank is given of a vocabulary-parallel loss: all tokens, and the words from `first` on."""

from __future__ import annotations

from typing import NamedTuple

import torch

from xscale_kernels.cross_entropy.terms import Terms
from xscale_kernels.linear_cross_entropy.chunked import Head

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""lse, picked and total, each [N]."""


class Share(NamedTuple):
    """The arguments that every implementation takes; op.py says what they mean."""

    hidden: torch.Tensor
    """[N, D]."""
    weight: torch.Tensor
    """[V_local, D]."""
    bias: torch.Tensor | None
    """[V_local]."""
    targets: torch.Tensor
    """[N], over the whole vocabulary."""
    first: int
    terms: Terms
    chunk: int
    """Tokens in one block of logits."""

    @property
    def counted(self) -> torch.Tensor:
        """[N], true for tokens that are not ignored."""
        return self.targets != self.terms.ignore_index

    def local(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Targets counted from `first`, 0 where they are elsewhere, and which of them are here."""
        shifted = self.targets - self.first
        mine = (shifted >= 0) & (shifted < self.weight.shape[0]) & self.counted
        return shifted.where(mine, 0), mine

    def head(self) -> Head:
        """The projection, with room for the logits of a chunk."""
        return Head(self.weight, self.bias, min(self.chunk, max(self.hidden.shape[0], 1)))

    def of(self, kept: torch.Tensor | None) -> Share:
        """The same for some of the tokens; None for all."""
        if kept is None:
            return self
        return self._replace(hidden=self.hidden.index_select(0, kept), targets=self.targets.index_select(0, kept))
