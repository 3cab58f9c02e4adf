"""Chen et al. 2021 (Scatterbrain): low-rank (random features) plus sparse (LSH) attention.

A = phi(q) phi(k)^T + S, S_ij = exp(q_i . k_j) - phi(q_i) . phi(k_j) where h(q_i) = h(k_j) and 0 elsewhere: exact inside
buckets, unbiased elsewhere. o = A v / A 1. phi are the Performer's positive features, h is Reformer's hash.
"""

import math

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xscale.core.config import NonNegativeInt, PositiveInt
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.bucketed import tile_buckets, tile_places
from xscale.nn.attention.ops.chunked_scan import scan_multiply_adds
from xscale.nn.attention.ops.dense import repeat_kv, upcast
from xscale.nn.attention.ops.log_features import log_feature_sums
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.ops.random_features import RandomProjection
from xscale.nn.dims import Dims

TINY = 1e-12
"""Added to features of queries, whose largest is 1, so that no divisor is 0."""


@CORES.register(
    "scatterbrain",
    traits=CoreTraits(
        causal=True,
        bidirectional=True,
        cross=False,
        per_head=True,
        cost="T * (features * (4 * K + 2 + 4.5 * window) + 9 * window * K + 4.5 * window + buckets * K)",
        context=("ulysses",),
        decode=True,
    ),
    deviations=(
        "Scores are exact for the nearest `window` keys of the query's bucket, of one round of hashing; the paper's "
        "buckets have no such bound, and may come from several rounds.",
    ),
)
class Scatterbrain(Core):
    class Config(Core.Config):
        renamed = {"reach": "window"}

        features: PositiveInt = 64
        """Random directions, each a feature."""
        buckets: int = Field(default=16, ge=2, multiple_of=2)
        """Hash buckets, an even number."""
        window: PositiveInt = 32
        """Keys of its bucket for which a query's scores are exact, on each side (causal: before it), its own token's
        included."""
        seed: NonNegativeInt = 0
        """Seed of the directions and the hash."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config
        self.projection = RandomProjection(
            config.features, head_width, config.seed + dims.layer, False
        )
        self.turns = RandomProjection(
            config.buckets // 2, head_width, config.seed + dims.layer + 1, False
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        scale = q.shape[-1] ** -0.25
        k, ones = (
            repeat_kv(upcast(k) * scale, q.shape[1]),
            F.pad(repeat_kv(upcast(v), q.shape[1]), (0, 1), value=1.0),
        )
        q = upcast(q) * scale
        directions = self.projection(q, None)
        along = q @ directions.mT
        top = along.amax(-1, keepdim=True).detach()
        fq = (along - top).exp() + TINY
        log_fk = k @ directions.mT - k.square().sum(-1, keepdim=True) / 2
        kernel = self.kernel_choices.get("linear_attention")
        sums, highest = log_feature_sums(fq, log_fk, ones, mask, kernel=kernel)
        highest = highest.expand(k.shape[:3])  # [B, H, S]
        # Queries' features omit exp(-|q|^2 / 2), keys' are relative to m_i, and all omit 1 / F: so do the exact scores.
        lift = (
            q.square().sum(-1) / 2
            - top[..., 0]
            - highest[:, :, mask.offset :]
            + math.log(self.config.features)
        )
        tiles = tile_buckets(self._hash(q), self._hash(k), self.config.window, mask)
        exact = tiles.queries(q) @ tiles.keys(k).mT + tiles.queries(
            lift[..., None]
        )  # [B, H, M, C, W]
        exact = exact.masked_fill(~tiles.visible, float("-inf"))
        # The larger of features and exact scores has weights of 1 at most.
        largest = tiles.to_sequence(
            exact.detach().amax(-1, keepdim=True).clamp(min=0)
        )  # [B, H, T, 1]
        fk = (log_fk - highest[..., None]).exp()
        rises = tiles.keys(highest[..., None]).mT - tiles.queries(
            highest[:, :, mask.offset :, None]
        )
        estimate = (tiles.queries(fq) @ tiles.keys(fk).mT) * rises.clamp(max=0).exp()
        shift = tiles.queries(largest)
        weights = (exact - shift).exp() - estimate.masked_fill(~tiles.visible, 0.0) * (-shift).exp()
        sums = sums * (-largest).exp() + tiles.to_sequence(weights @ tiles.keys(ones))
        return (sums[..., :-1] / sums[..., -1:]).to(v.dtype)

    def _hash(self, x: Tensor) -> Tensor:
        """Hash x [B, H, S, K] -> buckets [B, H, S]."""
        rotated = x.detach() @ self.turns(x, None).mT
        return torch.cat((rotated, -rotated), -1).argmax(-1)

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        config = self.config
        scores = (
            tile_places(queries, keys, config.window)
            * min(config.window, keys)
            * (2 if self.causal else 3)
        )
        hashed = (queries + keys) * head_width * config.buckets // 2
        sparse = scores * (2 * head_width + 1 + config.features) + hashed
        features = (queries + keys) * config.features * head_width
        scan = scan_multiply_adds(queries, keys, config.features, head_width, self.causal)
        return float(heads * (sparse + features + scan))
