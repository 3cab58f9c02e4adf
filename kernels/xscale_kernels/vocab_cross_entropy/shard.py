"""Inputs of one rank of a vocabulary-parallel loss: all tokens, and the vocabulary entries from `first` on."""

from __future__ import annotations

from typing import NamedTuple

import torch

from xscale_kernels.cross_entropy.op import LossTerms
from xscale_kernels.linear_cross_entropy.chunked import ChunkedProjection

ShardStatistics = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""lse, picked and total, each [N]."""


class VocabShard(NamedTuple):
    """Arguments of every implementation, as documented in op.py."""

    hidden: torch.Tensor
    """[N, D]."""
    weight: torch.Tensor
    """[V_local, D]."""
    bias: torch.Tensor | None
    """[V_local]."""
    targets: torch.Tensor
    """[N], over the whole vocabulary."""
    first: int
    terms: LossTerms
    chunk: int
    """Tokens in one block of logits."""

    @property
    def counted(self) -> torch.Tensor:
        """[N] bool, true for tokens that are not ignored."""
        return self.targets != self.terms.ignore_index

    def local(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Local targets [N], 0 for those on other ranks, and a mask [N] of those on this rank."""
        shifted = self.targets - self.first
        is_local = (shifted >= 0) & (shifted < self.weight.shape[0]) & self.counted
        return shifted.where(is_local, 0), is_local

    def projection(self) -> ChunkedProjection:
        """Build the projection with a buffer for the logits of a chunk."""
        return ChunkedProjection(
            self.weight, self.bias, min(self.chunk, max(self.hidden.shape[0], 1))
        )

    def select(self, kept: torch.Tensor | None) -> VocabShard:
        """Select some tokens by index; None keeps all."""
        if kept is None:
            return self
        return self._replace(
            hidden=self.hidden.index_select(0, kept), targets=self.targets.index_select(0, kept)
        )
