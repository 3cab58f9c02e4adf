"""A target's length from its source, for decoders that write all tokens at once (Ghazvininejad et al. 2019, 3.3).

    P(N | X) = softmax(W mean_s(h_s) + b)

h are the outputs [B, S, D] of the encoder, whose mean is over the tokens of the source.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.core.config import Config, PositiveFloat
from xscale.nn.auxiliary import attach
from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.module import Module
from xscale.nn.roles import Role
from xscale.nn.signals import BATCH, Signal, TokenAxes
from xscale.nn.tokens import Tokens

LENGTHS = Signal[Tensor]("length_head.lengths", TokenAxes((BATCH,)))
"""[B] length of the target of each source, less 1; None: it is not told."""


class LengthHeadConfig(Config):
    weight: PositiveFloat = 0.1
    """Weight of its loss, the mean over the sequences, beside that of the tokens."""


class LengthHead(Module):
    """[B, S, D] -> logits [B, L] of the lengths 1 to L, the longest that the model takes."""

    beside_stages = True
    seams = {"sum_over_sequence": Role.SUM_OVER_TOKENS}

    def __init__(self, config: LengthHeadConfig, dims: Dims) -> None:
        super().__init__()
        self.loss_weight = config.weight
        self.classifier = Linear.from_width(dims, dims.length, "state", bias=True)
        # A classifier is no map between hidden states, which optimizers of matrices update.
        self.classifier.linear_maps.clear()

    def forward(self, memory: Tensor, source: Tokens) -> Tensor:
        """`source` are the tokens of the memory; those of other documents than 0 are padding."""
        is_text = source.real() if source.documents is None else source.documents == 0
        if is_text is None:
            mean = memory.mean(1)
        else:
            weights = is_text[..., None].to(memory.dtype)  # [B, S, 1]
            total, count = ((memory * weights).sum(1), weights.sum(1))
            mean = self.sum_over_sequence(total) / self.sum_over_sequence(count)
        logits: Tensor = self.classifier(mean)
        return logits

    def attach_loss(self, x: Tensor, memory: Tensor, source: Tokens, factor: float = 1.0) -> Tensor:
        """Return x [B, T, D] with `factor` times the loss of the lengths attached that `source` tells; without them
        x itself."""
        forward, lengths = source.forward, source.get(LENGTHS)
        if lengths is None or (forward.aux_loss_weight is None and forward.stats is None):
            return x
        logits = self(memory, source)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits, lengths)
        if forward.stats is not None:
            accuracy = (logits.argmax(-1) == lengths).to(loss.dtype).mean()
            forward.stats.add(f"{self.path}/loss", loss)
            forward.stats.add(f"{self.path}/accuracy", accuracy)
        if forward.aux_loss_weight is None:
            return x
        # Each shard of a sequence has the whole loss, and the gradients of all shards are summed.
        return attach(
            x, loss, self.loss_weight * factor * forward.aux_loss_weight * source.fraction()
        )

    def sum_over_sequence(self, x: Tensor) -> Tensor:
        """Sum over the tokens of the source, of x [B, D], the sum over this process' tokens. A seam: a sequence that
        context parallelism shards."""
        return x
