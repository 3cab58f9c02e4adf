"""Token embeddings, with input position encodings, after global tokens if any."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from xscale.nn.dims import Dims
from xscale.nn.linear import Embedding, Linear
from xscale.nn.model.model import Model
from xscale.nn.module import Module
from xscale.nn.norm.norm import NORMS, Norm
from xscale.nn.position.position import POSITIONS, Position
from xscale.nn.random import reseed
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


class Embed(Module):
    """Token ids [B, T] -> [B, M + T, D], M the global tokens."""

    seams = {"embed": Role.EMBEDDING}
    start: Parameter
    types: Parameter

    def __init__(
        self,
        config: Model.Config,
        dims: Dims,
        table: Embedding | None = None,
        norm: Norm.Config | None = None,
        globals: int = 0,
        mean: bool = False,
        types: int = 0,
        factor_width: int | None = None,
    ) -> None:
        """`table` is tied to another Embed's, as encoder and decoder do. `mean`: the mean of the text's embeddings is
        added to each global token. `types`: rows of the table of token types; a token whose type
        is not told gets the first. `factor_width`: E, the width of everything here up to a linear map to D (Lan et al.
        2020, ALBERT); None: D."""
        super().__init__()
        self.project: Linear | None = None
        if factor_width is not None:
            self.project = Linear(
                factor_width, dims.width, ("width", "state"), dims.init, bias=True
            )
            dims = replace(dims, width=factor_width)
        self.globals = globals
        self.mean = mean
        if globals:
            self.declare("start", (globals, dims.width), ("tokens", "width"), dims.init)
        self.table = table or Embedding(
            dims.vocabulary, dims.width, dims.init, fix_norm=config.fix_norm
        )
        self.has_types = types > 0
        if types:
            self.declare("types", (types, dims.width), ("state", "width"), dims.init)
        self.dropout = config.dropout
        self.scale = dims.width**0.5 if config.scale_embeddings else None
        at_input = POSITIONS.of(config.position).traits.where == "input"
        self.position: Position | None = (
            POSITIONS.build(config.position, dims) if at_input else None
        )
        self.norm: Norm | None = None if norm is None else NORMS.build(norm, dims.width)

    def forward(self, tokens: Tokens) -> Tensor:
        return self.embed(tokens)

    def embed(self, tokens: Tokens) -> Tensor:
        """Token ids [B, T] -> [B, M + T, D]. A seam: where the sequence is sharded, each rank keeps its shard."""
        x: Tensor = self.table(tokens.ids)
        if self.scale is not None:
            x = x * self.scale
        if self.position is not None:
            x = self.position.embed(x, tokens)
        if self.has_types:
            table = self.use(self.types).to(x.dtype)
            x = x + (table[0] if tokens.types is None else F.embedding(tokens.types, table))
        if self.globals:
            start = self.use(self.start).to(x.dtype).expand(len(x), -1, -1)  # [B, M, D]
            x = torch.cat(
                (start + x.mean(1, keepdim=True) if self.mean else start, x), 1
            )  # [B, M + T, D]
        if self.norm is not None:
            x = self.norm(x)
        if self.training and tokens.forward.rng_seed is not None and self.dropout:
            # Dropout is seeded by name, as in a stack, so that neither the layout nor a restart changes it.
            reseed(tokens.forward.rng_seed, self.path)
            x = self.random.dropout(x, self.dropout, ("batch", "tokens", "width"), tokens)
        return x if self.project is None else self.project(x)


def global_tokens_of(model: nn.Module) -> int:
    """Number of positions that a model puts before the text."""
    return sum(module.globals for module in model.modules() if isinstance(module, Embed))
