"""The way into a model: token embeddings, with positions where these act on the input."""

import torch.nn.functional as F
from torch import Tensor

from xscale.nn.dims import Dims
from xscale.nn.linear import Embedding
from xscale.nn.model import Model
from xscale.nn.module import Module
from xscale.nn.position import POSITIONS, Position
from xscale.nn.tokens import Tokens


class Embed(Module):
    """Token ids [B, T] -> [B, T, D]."""

    def __init__(self, config: Model.Config, dims: Dims, table: Embedding | None = None) -> None:
        """`table` is shared with another Embed, as the two sides of an encoder-decoder share theirs."""
        super().__init__()
        self.table = table or Embedding(dims.vocabulary, dims.width, dims.start)
        self.dropout = config.dropout
        at_input = POSITIONS.of(config.position).traits.where == "input"
        self.position: Position | None = POSITIONS.build(config.position, dims) if at_input else None

    def forward(self, tokens: Tokens) -> Tensor:
        x = self.table(tokens.ids)
        if self.position is not None:
            x = self.position.embed(x, tokens)
        return F.dropout(x, self.dropout, self.training and tokens.noise is not None)
