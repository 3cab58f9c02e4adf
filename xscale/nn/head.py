"""The way out of the model: scores over the vocabulary, or the loss without keeping them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.nn.dims import Dims
from xscale.nn.init import ZEROS
from xscale.nn.linear import Embedding
from xscale.nn.module import Module
from xscale.nn.tokens import Tokens
from xscale.nn.transform import Transform
from xscale_kernels.linear_cross_entropy.op import linear_cross_entropy

IGNORED = -100
"""A target that weighs nothing."""


class Head(Module):
    """Hidden states to logits; with `tied` the embedding's table is the weight (Press and Wolf 2017)."""

    weight: Parameter

    def __init__(
        self,
        dims: Dims,
        tied: Embedding | None,
        *,
        bias: bool = False,
        transform: Transform | None = None,
        globals: int = 0,
    ) -> None:
        super().__init__()
        self.globals = globals
        """Places before the text, of which nothing is said."""
        self.transform = transform
        """What the hidden states pass first; None: nothing."""
        self.bias: Tensor | None
        if bias:
            self.declare("bias", (dims.vocabulary,), ("vocab",), ZEROS)
        else:
            self.register_parameter("bias", None)
        if tied is None:
            self.declare("weight", (dims.vocabulary, dims.width), ("vocab", "width"), dims.start)
        else:
            self.weight = tied.weight
        self.cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor] = self.summed
        """From x [N, D], the weight and targets [N] to the summed loss: a seam, for a part of the vocabulary."""

    def forward(self, x: Tensor, targets: Tensor | None = None, tokens: Tokens | None = None) -> Tensor:
        """[B, M + T, D] -> logits [B, T, V]; with targets [B, T], the sum of their cross-entropy in nats, a float32
        scalar. M are the global tokens.

        `tokens` are those of `x`; nothing here asks, but who guards the head may.

        A target of -100 costs 0. The logits of a whole batch never exist at once.
        """
        x = x[:, self.globals :]
        if self.transform is not None:
            x = self.transform(x)
        weight = self.use(self.weight)
        if self.bias is not None:
            # As one more column, so that the loss needs to know of no bias, whole or of a part of the vocabulary.
            weight = torch.cat((weight, self.use(self.bias)[:, None]), 1)  # [V, D + 1]
            x = F.pad(x, (0, 1), value=1.0)
        if targets is None:
            return F.linear(x, weight)
        return self.cross_entropy(x.flatten(0, 1), weight, targets.flatten())

    def summed(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """x [N, D], weight [V, D], targets [N] -> the sum of their cross-entropy, a scalar of float32 or wider."""
        kernel = self.named.get("linear_cross_entropy")
        return linear_cross_entropy(x, weight, targets, ignore_index=IGNORED, implementation=kernel)
