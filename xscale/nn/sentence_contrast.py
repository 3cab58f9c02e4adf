"""Contrastive predictive coding of sentences (van den Oord et al. 2018; Ainslie et al. 2020, ETC): the global token of
a masked sentence is to predict what a global token says of that sentence alone.

    loss = -log(exp(g_i . c_i / sqrt(D)) / sum_j exp(g_i . c_j / sqrt(D)))

g_i [D] is the state of the global token of masked sentence i, c_i that of the sentence encoded by itself, and j the
masked sentences of a micro-batch, of all data-parallel ranks: those of other texts, and the others of its own, are
negatives.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.nn.auxiliary import attach
from xscale.nn.module import Module
from xscale.nn.tokens import Tokens


class SentenceContrast(Module):
    """The loss of masked sentences, attached to the hidden states as an auxiliary one."""

    seams: ClassVar[tuple[str, ...]] = ("gather", "gather_sequence")

    def attach_loss(self, x: Tensor, tokens: Tokens, alone: Tensor, sentences: Tokens) -> Tensor:
        """Return x [B, M + T, D], of which the first M are global, with the loss of K masked sentences a text attached.

        `alone` [B * K, M + N, D] are the states of the sentences by themselves; `tokens.sentence_globals` [B, K] says
        which global token is that of each. `tokens` and `sentences` have the global tokens too. The loss is the mean
        over the micro-batch.
        """
        forward = tokens.forward
        assert tokens.sentence_globals is not None
        places = tokens.sentence_globals[..., None].expand(-1, -1, x.shape[-1])
        summaries = self.gather_sequence(x, tokens).gather(1, places).flatten(0, 1)  # [B * K, D]
        candidates, first = self.gather(self.gather_sequence(alone, sentences)[:, 0])
        dtype = torch.promote_types(x.dtype, torch.float32)
        logits = summaries.to(dtype) @ candidates.to(dtype).mT * x.shape[-1] ** -0.5
        labels = first + torch.arange(len(summaries), device=x.device)
        loss = F.cross_entropy(logits, labels)
        if forward.stats is not None:
            forward.stats.add(f"{self.path}/loss", loss.detach())
            forward.stats.add(f"{self.path}/accuracy", (logits.argmax(-1) == labels).to(dtype).mean())
        if forward.aux_loss_weight is None:
            return x
        weight = forward.aux_loss_weight * tokens.sentence_weight * tokens.further_loss_weight()
        # Each shard of a sequence has the whole loss, and the gradients of all shards are summed.
        return attach(x, loss, weight * tokens.fraction())

    def gather(self, alone: Tensor) -> tuple[Tensor, int]:
        """Return the states [N, D] of the sentences of all ranks, and the index of the first of this rank's. A seam:
        data parallelism."""
        return alone, 0

    def gather_sequence(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Return the hidden states of the sequence. A seam: those whose sequence is sharded over tp or cp."""
        return x
