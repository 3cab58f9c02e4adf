"""Contrastive predictive coding of sentences (van den Oord et al. 2018; Ainslie et al. 2020, ETC): the global token of
a masked sentence is to predict what a global token says of that sentence alone.

    loss = -log(exp(g_i . c_i / sqrt(D)) / sum_j exp(g_i . c_j / sqrt(D)))

g_i [D] is the state of the global token of masked sentence i, c_i that of the sentence encoded by itself, and j the
masked sentences of a micro-batch, of all data-parallel ranks: those of other texts, and the others of its own, are
negatives.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.nn.auxiliary import attach
from xscale.nn.module import Module
from xscale.nn.roles import Role
from xscale.nn.signals import BATCH, Signal, TokenAxes
from xscale.nn.tokens import Tokens

SENTENCES = Signal[Tensor]("sentence_contrast.sentences", TokenAxes((BATCH, "sentences", "words")))
"""[B, K, N] ids of the masked sentences of each sequence, as they were; None: there are none."""
SENTENCE_GLOBALS = Signal[Tensor]("sentence_contrast.globals", TokenAxes((BATCH, "sentences")))
"""[B, K] index of the global token of each of these sentences."""
SENTENCE_WEIGHT = Signal[float]("sentence_contrast.weight")
"""Weight of the contrastive loss beside the loss of the tokens."""


def contrasts_sentences(tokens: Tokens) -> bool:
    """Whether there are masked sentences and a contrastive loss of them, which evaluation has not."""
    has_loss = tokens.forward.aux_loss_weight is not None or tokens.forward.stats is not None
    return has_loss and tokens.get(SENTENCES) is not None


class SentenceContrast(Module):
    """The loss of masked sentences, attached to the hidden states as an auxiliary one."""

    seams = {
        "gather": Role.NEGATIVES,
        "replicated_input": Role.REPLICATED_INPUT,
        "full_sequence": Role.FULL_SEQUENCE,
    }

    def attach_loss(self, x: Tensor, tokens: Tokens, alone: Tensor, sentences: Tokens) -> Tensor:
        """Return x [B, M + T, D], of which the first M are global, with the loss of K masked sentences a text attached.

        `alone` [B * K, M + N, D] are the states of the sentences by themselves; `SENTENCE_GLOBALS` [B, K] says
        which global token is that of each. `tokens` and `sentences` have the global tokens too. The loss is the mean
        over the micro-batch.
        """
        forward = tokens.forward
        global_tokens = tokens.get(SENTENCE_GLOBALS)
        assert global_tokens is not None
        places = global_tokens[..., None].expand(-1, -1, x.shape[-1])
        summaries = self._all_states(x, tokens).gather(1, places).flatten(0, 1)  # [B * K, D]
        candidates, first = self.gather(self._all_states(alone, sentences)[:, 0])
        dtype = torch.promote_types(x.dtype, torch.float32)
        logits = summaries.to(dtype) @ candidates.to(dtype).mT * x.shape[-1] ** -0.5
        labels = first + torch.arange(len(summaries), device=x.device)
        loss = F.cross_entropy(logits, labels)
        if forward.stats is not None:
            forward.stats.add(f"{self.path}/loss", loss.detach())
            forward.stats.add(
                f"{self.path}/accuracy", (logits.argmax(-1) == labels).to(dtype).mean()
            )
        if forward.aux_loss_weight is None:
            return x
        weight = (
            forward.aux_loss_weight
            * (tokens.get(SENTENCE_WEIGHT) or 0.0)
            * tokens.further_loss_weight()
        )
        # Each shard of a sequence has the whole loss, and the gradients of all shards are summed.
        return attach(x, loss, weight * tokens.fraction())

    def gather(self, alone: Tensor) -> tuple[Tensor, int]:
        """Return the states [N, D] of the sentences of all ranks, and the index of the first of this rank's. A seam:
        data parallelism."""
        return alone, 0

    def _all_states(self, x: Tensor, tokens: Tokens) -> Tensor:
        return self.full_sequence(self.replicated_input(x, tokens), tokens)[0]

    def replicated_input(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Return the hidden states of the sequence. A seam: those whose sequence is sharded over tp."""
        return x

    def full_sequence(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return all hidden states of the sequences of x [B, M + T, D], and the places of its tokens [M + T].

        A seam: a rank of context parallelism has some of the tokens.
        """
        return x, torch.arange(x.shape[1], device=x.device)
