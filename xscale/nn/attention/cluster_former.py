"""Wang et al. 2021 (Cluster-Former): tokens are sorted by cluster and split into chunks, each of which sees itself.

The centroids move by k-means on a memory of hidden states and have no gradient: after every `update_every` steps each
becomes the mean of the states that were nearest to it in those steps. Then the centroids are put in a chain, each
followed by the nearest one that is left, so that clusters which share a chunk are similar. Points are layer-normed, and
directions are compared.

The mixer `cluster_former` sorts all heads by the layer's input, as in the paper. The paper puts such layers between
layers of sliding windows, as `configs/model/attention_cluster_former.yaml` does.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveInt
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.chunks import split_chunks
from xscale.nn.attention.ops.dense import masked_softmax, repeat_kv, upcast
from xscale.nn.attention.ops.kmeans import (
    centroid_scores,
    centroid_sums,
    chain_centroids,
    normalize_points,
)
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.axes import Axis
from xscale.nn.dims import Dims
from xscale.nn.init import Init
from xscale.nn.module import Module
from xscale.nn.post_step import WeightWriter


class StateMemory(Module):
    """Sums and numbers of the points of each cluster since the centroids last moved."""

    keeps_precision = True
    sums: Parameter

    def __init__(self, shape: tuple[int, ...], axes: tuple[Axis, ...]) -> None:
        super().__init__()
        self.declare("sums", shape, axes, Init(std=0.0), decays=False)
        self.sums.requires_grad_(False)

    def forward(self) -> Tensor:
        return self.use(self.sums)


@CORES.register(
    "cluster_former",
    traits=CoreTraits(
        causal=False,
        bidirectional=True,
        cross=False,
        per_head=True,
        cost="T * clusters * K + 2 * T * chunk_length * K",
        context=("ulysses",),
        running_stats=True,
    ),
    deviations=(
        "Outside the mixer cluster_former each head sorts the tokens by its keys; the paper sorts once for all heads.",
        "The memory holds the sums and numbers of the states of the last steps, from which each update makes one "
        "iteration of k-means; the paper's holds a fixed number of states, on which k-means runs to its end.",
    ),
)
class ClusterFormer(Core):
    set_by_mixer = ("points", "input", "cluster_former")
    centroids: Parameter

    class Config(Core.Config):
        renamed = {"chunk": "chunk_length"}

        clusters: PositiveInt = 16
        """Centroids of each head; in the mixer `cluster_former`, of all heads together."""
        chunk_length: PositiveInt = 64
        """Tokens of a chunk, in order of clusters; they see each other."""
        update_every: PositiveInt = 1
        """Steps whose states the memory holds, after which the centroids move."""
        points: Literal["keys", "input"] = "keys"
        """Clustered vectors. keys: the keys of each head; input: the layer's input, which the mixer `cluster_former`
        passes and sets here."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config
        self.all_heads, width = (heads, head_width) if config.points == "keys" else (1, dims.width)
        shape = (self.all_heads, config.clusters, width)
        axes: tuple[Axis, ...] = ("heads" if config.points == "keys" else "state", "state", "state")
        # Parameters, so that they are initialised, sharded and saved like others; `update_state` moves them.
        self.declare("centroids", shape, axes, Init(std=1.0))
        self.centroids.requires_grad_(False)
        self.memory: StateMemory | None = None
        if config.update_every > 1:
            self.memory = StateMemory((*shape[:2], width + 1), axes)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        assert self.config.points == "keys", "the mixer cluster_former calls `attend`"
        return self.attend(q, k, v, repeat_kv(upcast(k), q.shape[1]), mask)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, points: Tensor, mask: AttentionMask
    ) -> Tensor:
        """Attend within chunks of tokens sorted by the clusters of `points`, [B, H, S, K] or [B, 1, S, D]."""
        assert not mask.causal
        assert mask.queries == mask.keys
        centroids = self.use(self.centroids).to(upcast(q).dtype)
        points = normalize_points(points.detach())
        order = (
            centroid_scores(points, centroids).argmax(-1).argsort(dim=-1, stable=True)
        )  # [B, H or 1, S]
        k, values = repeat_kv(upcast(k), q.shape[1]), repeat_kv(upcast(v), q.shape[1])
        size = min(self.config.chunk_length, k.shape[2])
        index = order[..., None].expand_as(k)
        rows, keys, values = (
            split_chunks(x.gather(2, index), 2, size) for x in (upcast(q), k, values)
        )
        empty = (
            torch.arange(keys.shape[2] * size, device=q.device).view(-1, 1, size) >= k.shape[2]
        )  # [N, 1, C]
        sorted_out = masked_softmax(rows @ keys.mT * q.shape[-1] ** -0.5, empty) @ values
        inverse_order = order.argsort(-1)[..., None].expand_as(k)
        out = sorted_out.flatten(2, 3)[:, :, : k.shape[2]].gather(2, inverse_order)
        if self.training and mask.stats is not None:
            self._collect(centroids, points, mask)
        return out.to(v.dtype)

    def _collect(self, centroids: Tensor, points: Tensor, mask: AttentionMask) -> None:
        """Collect the sums of the points of each cluster, and the state that `update_state` needs in full."""
        assert mask.stats is not None
        first = self.first_head if self.config.points == "keys" else 0
        heads = self.all_heads
        sums = centroid_sums(centroids, first, heads, points)
        padding = (0, 0, 0, 0, first, heads - first - len(centroids))
        if self.memory is not None:
            mask.stats.record(self, "memory", F.pad(self.memory(), padding))
        mask.stats.record(self, "found", sums)
        mask.stats.record(self, "centroids", F.pad(centroids, padding))

    @torch.no_grad()
    def update_state(self, means: dict[str, Tensor], weights: WeightWriter) -> None:
        """Add the step to the memory; after `update_every` steps move the centroids and empty it."""
        sums = means[f"{self.path}/found"]  # [H, C, K + 1]
        # The mean over ranks counts zeros for the heads of other ranks; the counts' mean tells their fraction.
        present = sums[..., -1:].mean(1, keepdim=True)  # [H, 1, 1]
        if self.memory is not None:
            sums = sums + means[f"{self.path}/memory"]
        sums = sums / present
        if (
            self.memory is not None
            and round(sums[..., -1].mean().item()) < self.config.update_every
        ):
            weights.write(self.memory.sums, sums)
            return
        counts = sums[..., -1:]
        moved = torch.where(
            counts > 0, sums[..., :-1] / counts, means[f"{self.path}/centroids"] / present
        )
        weights.write(self.centroids, chain_centroids(moved))
        if self.memory is not None:
            weights.update(self.memory.sums, torch.zeros_like)

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        size = min(self.config.chunk_length, keys)
        padded = -(-keys // size) * size
        clustered = keys * self.config.clusters
        labels = clustered * (
            heads * head_width if self.config.points == "keys" else self.centroids.shape[2]
        )
        return float(labels + heads * head_width * 2 * padded * size)
