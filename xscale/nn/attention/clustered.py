"""Vyas et al. 2020 (clustered attention): queries are clustered, and all queries of a cluster attend as their mean.

Clusters: signs of random projections, then Lloyd iterations in Hamming space. Improved: each query recomputes its
weights on its cluster's top-k keys from its own scores, scaled to the cluster's total weight of those keys.
"""

import torch
from torch import Tensor

from xscale.core.config import NonNegativeInt, PositiveInt
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.dense import repeat_kv, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.random import SeededNumbers


@CORES.register(
    "clustered",
    traits=CoreTraits(
        causal=False,
        bidirectional=True,
        cross=False,
        per_head=True,
        cost="2 * clusters * S * K + T * K * bits + 2 * T * K * top_k + (2 * iterations + 1) * T * clusters * bits",
        context=("ulysses",),
    ),
)
class Clustered(Core):
    class Config(Core.Config):
        renamed = {"steps": "iterations", "top": "top_k"}

        clusters: PositiveInt = 100
        """Clusters of queries."""
        bits: PositiveInt = 63
        """Bits of the hash: random projections whose signs are compared."""
        iterations: NonNegativeInt = 10
        """Lloyd iterations."""
        top_k: NonNegativeInt = 32
        """Keys of each cluster whose weights each query recomputes; 0: none (not improved)."""
        seed: NonNegativeInt = 0
        """Seed of the projections."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config
        self.seed = config.seed + dims.layer

    @classmethod
    def example(cls) -> "Clustered.Config":
        """Config for sequences of a few hundred tokens."""
        return cls.Config(clusters=16, bits=15, iterations=3, top_k=8)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        assert not mask.causal
        q, k, values = upcast(q), repeat_kv(upcast(k), q.shape[1]), repeat_kv(upcast(v), q.shape[1])
        count = min(self.config.clusters, mask.queries)
        label = self.label(q.detach(), count)  # [B, H, T]
        sizes = q.new_zeros(*q.shape[:2], count).scatter_add(2, label, torch.ones_like(q[..., 0]))
        at = label[..., None].expand_as(q)
        means = q.new_zeros(*q.shape[:2], count, q.shape[-1]).scatter_add(2, at, q)
        means = means / sizes.clamp(min=1)[..., None]
        scores = means @ k.mT * q.shape[-1] ** -0.5  # [B, H, C, S]
        weights = scores.softmax(-1)
        top = min(self.config.top_k, mask.keys)
        if not top:
            plain: Tensor = (weights @ values).gather(2, at)
            return plain.to(v.dtype)
        # By scores: small weights are all 0 in float32.
        top_keys = scores.detach().topk(top, -1).indices  # [B, H, C, J]
        return self._improved(q, k, values, weights, label, top_keys).to(v.dtype)

    def _improved(
        self, q: Tensor, k: Tensor, v: Tensor, weights: Tensor, label: Tensor, top_indices: Tensor
    ) -> Tensor:
        top, top_weights = top_indices.shape[-1], weights.gather(-1, top_indices)  # [B, H, C, J]
        # Every query of a cluster takes the cluster's attention to all other keys.
        from_other_keys = weights.scatter(-1, top_indices, 0.0) @ v
        width = q.shape[-1]
        top_keys = top_indices.gather(2, label[..., None].expand(-1, -1, -1, top))  # [B, H, T, J]
        keys, values = (_rows(x, top_keys) for x in (k, v))  # [B, H, T, J, K]
        top_scores = (keys @ q[..., None])[..., 0] * width**-0.5
        weights_on_top = top_scores.softmax(-1) * top_weights.sum(-1).gather(2, label)[..., None]
        top_out: Tensor = (weights_on_top[..., None, :] @ values)[..., 0, :]
        return top_out + from_other_keys.gather(2, label[..., None].expand(-1, -1, -1, width))

    def label(self, q: Tensor, count: int) -> Tensor:
        """Assign each query to a cluster: [B, H, T, K] -> [B, H, T]."""
        projection = SeededNumbers(self.seed).normal(q.shape[-1], self.config.bits).to(q)
        signs = torch.where(q @ projection > 0, 1.0, -1.0).to(q.dtype)  # [B, H, T, bits]
        start = torch.arange(count, device=q.device) * q.shape[2] // count
        centroids = signs[:, :, start]
        for _ in range(self.config.iterations):
            label = (signs @ centroids.mT).argmax(-1)
            members = torch.nn.functional.one_hot(label, count).to(q.dtype)
            sums = members.mT @ signs  # a centroid's bit is the majority of its members' bits
            centroids = torch.where(sums > 0, 1.0, torch.where(sums < 0, -1.0, centroids))
        return (signs @ centroids.mT).argmax(-1)

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        config = self.config
        count, top = min(config.clusters, queries), min(config.top_k, keys)
        lloyd = queries * (
            head_width * config.bits + (2 * config.iterations + 1) * count * config.bits
        )
        return float(heads * (lloyd + 2 * head_width * (count * keys + queries * top)))


def _rows(x: Tensor, at: Tensor) -> Tensor:
    """x [B, H, S, K] at [B, H, T, J] -> [B, H, T, J, K]."""
    flat = at.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1])
    return x.gather(2, flat).view(*at.shape, x.shape[-1])
