"""Lample et al. 2019: a large table of values, read by the nearest of keys that are pairs of sub-keys.

For each head, the two halves of a query are compared with two sets of sub-keys. The pairs of each half's k best are
the candidates; the k best of them are kept, and the output is the sum of their values, weighted by the softmax of their
scores.

The query norm is a layer norm instead of the paper's batch norm: a token's output depends on that token alone, and
there are no running statistics that would differ between layouts.
"""

from typing import Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import FractionBelowOne, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import at_most, take
from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import FFNS, Ffn, FfnTraits
from xscale.nn.init import Init
from xscale.nn.linear import Linear
from xscale.nn.tokens import Tokens


@FFNS.register(
    "product_key_memory",
    traits=FfnTraits(per_token=True, sparse=True),
    deviations=(
        "The query norm is a layer norm, so that a token's output depends on that token alone; the paper's is a batch "
        "norm.",
        "The values have the learning rate of the other parameters; the paper's have their own.",
    ),
)
class ProductKeyMemory(Ffn):
    class Config(Ffn.Config):
        subkeys: PositiveInt = 64
        """Sub-keys of each half; the memory has the square of this many values (the paper: 512)."""
        top_k: PositiveInt = 8
        """Values that each head reads (the paper: 32)."""
        heads: PositiveInt = 4
        """Heads, each with queries and sub-keys of its own; the values are shared."""
        query_width: int = Field(default=64, ge=1, multiple_of=2)
        """Width of a query; each half is compared with sub-keys (the paper: 256)."""
        query_norm: Literal["layer", "none"] = "layer"
        """Norm of the queries; without it few keys are ever used."""
        dropout: FractionBelowOne = 0.0
        """Dropout probability of the weights of the values read."""

    keys: Parameter
    values: Parameter

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        self.config = config
        half, subkeys = config.query_width // 2, config.subkeys
        self.query = Linear.from_width(dims, config.heads * config.query_width, "state")
        key_init = Init(std=half**-0.5)
        self.declare(
            "keys", (2, config.heads, subkeys, half), ("state", "state", "state", "state"), key_init
        )
        # Each head reads a weighted mean of k values, and H heads add up.
        value_init = Init(std=dims.residual_init.std)
        self.declare("values", (subkeys**2, dims.width), ("state", "width"), value_init)

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        if config.top_k <= config.subkeys:
            return []
        what = f"top_k={config.top_k} exceeds subkeys={config.subkeys}"
        return [
            at_most(
                f"{path}.top_k", what, config.subkeys, *take(config.top_k, key=f"{path}.subkeys")
            )
        ]

    def active_fraction(self) -> float:
        """Largest fraction of the values that a token reads."""
        return min(1.0, self.config.heads * self.config.top_k / self.config.subkeys**2)

    def active_fractions(self) -> dict[str, float]:
        return {"values": self.active_fraction()}

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        flat = x.flatten(0, 1)  # [N, D]
        scores, index = self.nearest(flat)  # [N, H, k]
        weights = scores.softmax(-1).view(*x.shape[:2], *scores.shape[1:])  # [B, T, H, k]
        p = self.config.dropout if self.training and tokens.forward.rng_seed is not None else 0.0
        weights = self.random.dropout(weights, p, ("batch", "tokens", "state", "state"), tokens)
        table = self.use(self.values)
        y = F.embedding_bag(
            index.flatten(1),
            table,
            mode="sum",
            per_sample_weights=weights.view(len(flat), -1).to(table.dtype),
        )
        return y.view(x.shape)

    def nearest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and indices of the values that tokens [N, D] read, [N, H, k], best first."""
        config = self.config
        queries = self.query(x).view(len(x), config.heads, config.query_width)  # [N, H, Q]
        if config.query_norm == "layer":
            queries = F.layer_norm(queries, queries.shape[-1:])
        keys = self.use(self.keys)  # [2, H, S, Q / 2]
        halves = queries.view(len(x), config.heads, 2, -1).permute(2, 1, 0, 3)  # [2, H, N, Q / 2]
        best, which = (halves @ keys.transpose(2, 3)).topk(config.top_k, dim=3)  # [2, H, N, k]
        pairs = (best[0][..., :, None] + best[1][..., None, :]).flatten(2)  # [H, N, k * k]
        scores, pair = pairs.topk(config.top_k, dim=2)  # [H, N, k]
        first = which[0].gather(2, pair // config.top_k)
        second = which[1].gather(2, pair % config.top_k)
        return scores.transpose(0, 1), (first * config.subkeys + second).transpose(0, 1)
