"""Ke et al. 2021 (TUPE), section 3: position scores with projections of their own, and an untied [CLS].

The score of query i and key j is (x_i W^Q)(x_j W^K) / sqrt(2K) + (p_i U^Q)(p_j U^K) / sqrt(2K) + b_{j-i}, where p is a
learned embedding of the position and b T5's bias by buckets of distances (TUPE-R; TUPE-A has none). Where the query is
[CLS] a number of the head stands in place of the last two terms, and another where the key is. All layers have the same
parameters but W: `shared`.
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveInt
from xscale.core.errors import Problem
from xscale.nn.dims import Dims
from xscale.nn.position.position import POSITIONS, Position, PositionTraits, check_table_length
from xscale.nn.position.relative import Relative


@POSITIONS.register(
    "tupe",
    traits=PositionTraits(
        where="bias", relative=False, extrapolates=False, cost="H*T*S*K + (T+S)*D*H*K"
    ),
    deviations=(
        "[CLS] is the token at position 0 of its document.",
        "Each layer computes the position scores again, also where all layers have the same parameters.",
    ),
)
class Tupe(Position):
    adds_bias = True
    score_factor = 2**-0.5
    table: Parameter
    query_weight: Parameter
    key_weight: Parameter
    from_cls: Parameter
    to_cls: Parameter

    class Config(Position.Config):
        length: PositiveInt | None = None
        """Positions in the table; null: the data's sequence length. Longer sequences fail."""
        untied_cls: bool = True
        """Whether the scores of a document's first token, [CLS], do not depend on positions."""
        relative: bool = True
        """Whether a bias by buckets of distances is added (TUPE-R); false: TUPE-A."""
        buckets: int = Field(default=32, ge=4)
        """Learned biases per head for distances."""
        distance: PositiveInt = 128
        """All distances from this one on share a bucket."""
        shared: bool = False
        """Whether all blocks of a stack have the same parameters, as in the paper; false: each block has its own."""

    def __init__(self, config: Config, dims: Dims, heads: int = 0, head_width: int = 0) -> None:
        super().__init__()
        self.shared = config.shared
        self.head_width, self.untied_cls = head_width, config.untied_cls
        inner, width = heads * head_width, dims.width
        self.declare("table", (config.length or dims.length, width), ("tokens", "width"), dims.init)
        self.declare("query_weight", (inner, width), ("heads", "width"), dims.init, linear_map=True)
        self.declare("key_weight", (inner, width), ("heads", "width"), dims.init, linear_map=True)
        self.distances = (
            Relative(_relative(config), dims, heads, head_width) if config.relative else None
        )
        if config.untied_cls:
            self.declare("from_cls", (heads,), ("heads",), dims.init, decays=False)
            self.declare("to_cls", (heads,), ("heads",), dims.init, decays=False)

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = check_table_length(config.length, dims, path)
        return problems + (Relative.check(_relative(config), dims, path) if config.relative else [])

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        table = self.use(self.table)
        projected = (
            F.linear(F.embedding(positions, table), self.use(weight))
            for positions, weight in ((queries, self.query_weight), (keys, self.key_weight))
        )
        q, k = (
            x.view(*x.shape[:-1], -1, self.head_width).transpose(1, 2) for x in projected
        )  # [B, H, T or S, K]
        scores: Tensor = q * (2 * self.head_width) ** -0.5 @ k.mT  # [B, H, T, S]
        if self.distances is not None:
            scores = scores + self.distances.bias(queries, keys)
        if self.untied_cls:
            from_cls, to_cls = (
                self.use(number)[:, None, None] for number in (self.from_cls, self.to_cls)
            )
            scores = torch.where((keys == 0)[:, None, None, :], to_cls, scores)
            scores = torch.where((queries == 0)[:, None, :, None], from_cls, scores)
        return scores


def _relative(config: Tupe.Config) -> Relative.Config:
    return Relative.Config(buckets=config.buckets, distance=config.distance)
