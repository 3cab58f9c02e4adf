"""The pooler and the sentence head of BERT (Devlin et al. 2019, section 3.1): a sequence's class by its first token.

    p = tanh(W_p h_1 + b_p),  logits = W_c p + b_c

h_1 [B, D] is the state of [CLS].
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xscale.core.config import Config
from xscale.nn.auxiliary import attach
from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.module import Module
from xscale.nn.roles import Role
from xscale.nn.signals import BATCH, Signal, TokenAxes
from xscale.nn.tokens import Tokens

LABELS = Signal[Tensor]("pooler.labels", TokenAxes((BATCH,)))
"""[B] class of each sequence, for the loss of a sentence head; None: there is none."""


class SentenceHeadConfig(Config):
    classes: int = Field(default=2, ge=2)
    """Classes of a sequence: 2 for next-sentence prediction and for the order of sentences, 3 for both in one."""


class Pooler(Module):
    """The state of a sequence's first token through a dense layer and tanh: [B, D] -> [B, D]."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dense = Linear.from_width(dims, dims.width, "state", bias=True)

    def forward(self, first: Tensor) -> Tensor:
        return torch.tanh(self.dense(first))


class SentenceHead(Module):
    """A pooler and a classifier, whose loss is attached to the hidden states as an auxiliary one: the mean over the
    sequences of a micro-batch, beside the loss of the tokens."""

    seams = {"first_state": Role.FIRST_TOKEN, "loss_fraction": Role.LOSS_FRACTION}

    def __init__(self, config: SentenceHeadConfig, dims: Dims, globals: int = 0) -> None:
        """`globals`: M, the global tokens, which come before the text."""
        super().__init__()
        self.classes = config.classes
        self.globals = globals
        self.pooler = Pooler(dims)
        self.classifier = Linear.from_width(dims, config.classes, "state", bias=True)
        self.loss_fraction = 1.0
        """Fraction of the loss of which this rank computes the gradient. A seam: the fractions of the ranks that have
        the same sequences add up to 1."""

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        """Hidden states [B, M + T, D], and their tokens, if they may be a shard -> logits [B, C]."""
        logits: Tensor = self.classifier(self.pooler(self.first_state(x, tokens)))
        return logits

    def first_state(self, x: Tensor, tokens: Tokens | None) -> Tensor:
        """Return the state [B, D] of the text's first token. A seam: another rank may have it."""
        return x[:, self.globals]

    def attach_loss(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Return x [B, M + T, D] with the loss of the `LABELS` attached; without labels x itself."""
        forward, labels = tokens.forward, tokens.get(LABELS)
        if labels is None or (forward.aux_loss_weight is None and forward.stats is None):
            return x
        logits = self(x, tokens)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits, labels)
        if forward.stats is not None:
            forward.stats.add(f"{self.path}/loss", loss.detach())
            forward.stats.add(
                f"{self.path}/accuracy", (logits.argmax(-1) == labels).to(loss.dtype).mean()
            )
        if forward.aux_loss_weight is None:
            return x
        return attach(
            x, loss, forward.aux_loss_weight * self.loss_fraction * tokens.further_loss_weight()
        )
