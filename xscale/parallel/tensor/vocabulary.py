"""Vocabulary-parallel embedding and loss (Shoeybi et al. 2019): rows of the table are sharded over tp.

No rank computes all logits.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.mesh.collectives import all_gather
from xscale.mesh.differentiable_collectives import sum_out
from xscale.nn.head.head import IGNORE_INDEX
from xscale.parallel.shard.region import TensorRegion
from xscale_kernels.cross_entropy import LossTerms
from xscale_kernels.vocab_cross_entropy import (
    Statistics,
    vocab_gradients,
    vocab_loss,
    vocab_statistics,
)


@dataclass(frozen=True)
class VocabParallelEmbedding:
    """Lookup in a table whose rows are sharded over tp; rows of other ranks count as zero."""

    region: TensorRegion
    first: int
    """Token id of this rank's first row."""

    def __call__(self, ids: Tensor, table: Tensor) -> Tensor:
        """Look up ids [...] in this rank's rows of the table and all-reduce: [..., D]."""
        row = ids - self.first
        is_local = (row >= 0) & (row < len(table))
        rows = F.embedding(row.where(is_local, 0), table) * is_local[..., None]
        return sum_out(rows, self.region.group)


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's part of the logits that a student and its teacher have over a vocabulary sharded over tp, in the
    place of `xscale.nn.head.distilled_head.FullVocabulary`."""

    region: TensorRegion
    first: int
    """Token id of this rank's first logit."""

    def own(self, logits: Tensor, count: int) -> Tensor:
        """[N, V] -> [N, count]."""
        return logits.narrow(-1, self.first, count)

    def logsumexp(self, logits: Tensor) -> Tensor:
        """Over the logits [N, V / R] of all R ranks -> [N]."""
        return all_gather(logits.logsumexp(-1)[None], 0, self.region.group).logsumexp(0)

    def total(self, sums: Tensor) -> Tensor:
        """Over the sums [N] of all ranks -> [N]."""
        return all_gather(sums[None], 0, self.region.group).sum(0)


@dataclass(frozen=True)
class ShardTokenRows:
    """Leaves out the padding rows of a shard of the vocabulary, which may have no others."""

    first: int
    """Token id of this rank's first row."""
    unpadded_vocabulary: int

    def __call__(self, rows: Tensor) -> Tensor:
        """[V_local, D] -> its rows that are tokens."""
        return rows[: max(0, self.unpadded_vocabulary - self.first)]


@dataclass(frozen=True)
class VocabParallelCrossEntropy:
    """Cross-entropy of a head whose vocabulary is sharded over tp; every rank gets the same loss."""

    region: TensorRegion
    first: int
    """Token id of this rank's first row."""
    vocabulary: int
    """Size of the full vocabulary, without padding."""
    kernel: str | None = None
    """Implementation that the recipe names."""
    soft_cap: float | None = None
    """Soft cap of the logits; None: no cap."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Tensor:
        """Return the summed loss of x [N, D] in the region, this rank's rows of the weight and targets [N].

        The gradient of x is this rank's part of a sum.
        """
        terms = LossTerms(IGNORE_INDEX, self.soft_cap or 0.0, z_loss, label_smoothing)
        loss: Tensor = _VocabParallelLoss.apply(x, weight, targets, self, terms)  # type: ignore[no-untyped-call]
        return loss


class _VocabParallelLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        loss: VocabParallelCrossEntropy,
        terms: LossTerms,
    ) -> Tensor:
        local = vocab_statistics(
            x, weight, targets, loss.first, terms=terms, implementation=loss.kernel
        )
        # One all-gather for the log-sums and target logits of all ranks, and for the sums of logits with label
        # smoothing: 2 or 3 numbers a token.
        summed = (local.picked, local.total) if terms.label_smoothing else (local.picked,)
        gathered = all_gather(
            torch.stack((local.lse, *summed))[None], 0, loss.region.group
        )  # [R, 2 or 3, N]
        totals = gathered[:, 1:].sum(0)
        combined = Statistics(gathered[:, 0].logsumexp(0), totals[0], totals[-1])
        context.save_for_backward(x, weight, targets, combined.lse)
        context.loss, context.terms = loss, terms
        return vocab_loss(combined, targets, loss.vocabulary, terms).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        x, weight, targets, lse = context.saved_tensors
        loss: VocabParallelCrossEntropy = context.loss
        gradients = vocab_gradients(
            x,
            weight,
            targets,
            loss.first,
            lse,
            gradient.expand(len(targets)),
            loss.vocabulary,
            terms=context.terms,
            implementation=loss.kernel,
        )
        return gradients.hidden, gradients.weight, None, None, None
