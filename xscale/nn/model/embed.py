"""The way into a model: token embeddings, with positions where these act on the input."""

from collections.abc import Callable

import torch
from torch import Tensor

from xscale.nn.block import drop
from xscale.nn.dims import Dims
from xscale.nn.init import seed_of
from xscale.nn.linear import Embedding
from xscale.nn.model import Model
from xscale.nn.module import Module
from xscale.nn.norm import NORMS, Norm
from xscale.nn.position import POSITIONS, Position
from xscale.nn.tokens import Tokens


class Embed(Module):
    """Token ids [B, T] -> [B, T, D]."""

    def __init__(
        self, config: Model.Config, dims: Dims, table: Embedding | None = None, norm: Norm.Config | None = None
    ) -> None:
        """`table` is shared with another Embed, as the two sides of an encoder-decoder share theirs."""
        super().__init__()
        self.table = table or Embedding(dims.vocabulary, dims.width, dims.start)
        self.dropout = config.dropout
        self.drop: Callable[[Tensor, float, Tokens], Tensor] = drop
        """Dropout: a seam, as a sublayer's."""
        at_input = POSITIONS.of(config.position).traits.where == "input"
        self.position: Position | None = POSITIONS.build(config.position, dims) if at_input else None
        self.norm: Norm | None = None if norm is None else NORMS.build(norm, dims.width)

    def forward(self, tokens: Tokens) -> Tensor:
        x: Tensor = self.table(tokens.ids)
        if self.position is not None:
            x = self.position.embed(x, tokens)
        if self.norm is not None:
            x = self.norm(x)
        if not self.training or tokens.noise is None or not self.dropout:
            return x
        # As in a stack: noise by name, so that neither the layout nor a restart changes it.
        torch.manual_seed(seed_of(tokens.noise, self.path))
        return self.drop(x, self.dropout, tokens)
