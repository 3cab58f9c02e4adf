"""The way out of the model: scores over the vocabulary, or the loss of each token without keeping them."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.nn.dims import Dims
from xscale.nn.linear import Embedding
from xscale.nn.module import Module

IGNORED = -100
"""A target that weighs nothing."""


class Head(Module):
    """Hidden states to logits; with `tied` the embedding's table is the weight (Press and Wolf 2017)."""

    weight: Parameter

    def __init__(self, dims: Dims, tied: Embedding | None) -> None:
        super().__init__()
        if tied is None:
            self.declare("weight", (dims.vocabulary, dims.width), ("vocab", "width"), dims.start)
        else:
            self.weight = tied.weight

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """[B, T, D] -> logits [B, T, V]; with targets [B, T], the cross-entropy of each token in nats, float32 [B, T].

        A target of -100 costs 0.
        """
        weight = self.use(self.weight)
        if targets is None:
            return F.linear(x, weight)
        logits = F.linear(x, weight)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none").view(
            targets.shape
        )
