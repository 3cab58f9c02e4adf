"""The way out of the model: scores over the vocabulary, or the loss without keeping them."""

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.nn.dims import Dims
from xscale.nn.linear import Embedding
from xscale.nn.module import Module
from xscale_kernels.linear_cross_entropy.op import linear_cross_entropy

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
        """[B, T, D] -> logits [B, T, V]; with targets [B, T], the sum of their cross-entropy in nats, a float32 scalar.

        A target of -100 costs 0. The logits of a whole batch never exist at once.
        """
        weight = self.use(self.weight)
        if targets is None:
            return F.linear(x, weight)
        return linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), ignore_index=IGNORED)
