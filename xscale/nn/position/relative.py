"""Raffel et al. 2020 (T5), section 2.1: a learned bias on the scores per head and bucket of distances.

Half of the buckets hold one distance each, the others ranges that grow exponentially up to `distance`. A bidirectional
model has half of its buckets for earlier keys and half for later ones. T5 has one table for all blocks of a stack:
`shared`.
"""

import math

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import at_least
from xscale.nn.dims import Dims
from xscale.nn.position.position import POSITIONS, Position, PositionTraits


@POSITIONS.register(
    "relative", traits=PositionTraits(where="bias", relative=True, extrapolates=True, cost="H*T*S")
)
class Relative(Position):
    adds_bias = True
    learns_relative_bias = True
    weight: Parameter

    class Config(Position.Config):
        buckets: int = Field(default=32, ge=4)
        """Learned biases per head and table."""
        distance: PositiveInt = 128
        """All distances from this one on share a bucket."""
        shared: bool = False
        """Whether all blocks of a stack have one table, as in T5; false: each block has its own."""

    def __init__(self, config: Config, dims: Dims, heads: int = 0, head_width: int = 0) -> None:
        super().__init__()
        self.causal = dims.causal
        self.distance = config.distance
        self.shared = config.shared
        self.declare("weight", (config.buckets, heads), ("state", "heads"), dims.init)

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        least = (config.buckets if dims.causal else config.buckets // 2) // 2
        if config.distance <= least:
            what = f"must be > {least}, the distances that have their own bucket, got {config.distance}"
            return [at_least(f"{path}.distance", what, config.buckets // 2 + 1)]
        return []

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        table = self.use(self.weight)
        offsets = keys[:, None, :] - queries[:, :, None]  # [B, T, S]
        return table[self.bucket(offsets, table.shape[0])].permute(0, 3, 1, 2)  # [B, H, T, S]

    @property
    def reach(self) -> int:
        return self.distance

    def bucket(self, offsets: Tensor, buckets: int) -> Tensor:
        """Offsets key - query -> bucket indices, of the same shape."""
        if self.causal:
            return _bucket_of((-offsets).clamp(min=0), buckets, self.distance)
        half = buckets // 2
        return _bucket_of(offsets.abs(), half, self.distance) + half * (offsets > 0)


def _bucket_of(distance: Tensor, buckets: int, furthest: int) -> Tensor:
    exact = buckets // 2
    growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(furthest / exact)
    coarse = exact + (growth * (buckets - exact)).long()
    return torch.where(distance < exact, distance, coarse.clamp(max=buckets - 1))
