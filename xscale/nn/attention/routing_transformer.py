"""Roy et al. 2021 (Routing Transformer): tokens are clustered by k-means, and see the tokens of their cluster.

q and k are layer-normed. Bidirectional: each centroid takes the same number of queries and of keys, its nearest; a
query in several clusters gets the mean of their outputs, a query in none gets zero. Top-k over all tokens is not
causal, so in causal models queries and keys belong to the centroid nearest to them, and a query sees the last `window`
keys of its cluster; it gets zero if there is none yet. Where queries and keys are shared (`shared_qk` of the mixer, as
in the paper's causal models), a token attends to itself only if it sees no other key.

After each step a centroid is updated by its queries and keys: m <- decay m + (1 - decay) sum (equations 8 and 9). Only
directions are compared. Sums are divided by the mean number of points of a centroid, so that they do not depend on the
batch, and the random start is as much smaller: it has the share of a point among a thousand.
"""

import torch
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import FractionBelowOne, PositiveInt
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.bucketed import tile_buckets, tile_places, tiled_attention
from xscale.nn.attention.ops.dense import repeat_kv, upcast
from xscale.nn.attention.ops.kmeans import (
    centroid_scores,
    centroid_sums,
    centroid_target,
    normalize_points,
)
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.init import Init
from xscale.nn.post_step import WeightWriter

START = Init(std=1e-3)
"""Initial centroids, in units of the mean of a step's points: the sums of equations 8 and 9 are over thousands."""


@CORES.register(
    "routing_transformer",
    aliases=("routing",),
    traits=CoreTraits(
        normalised=False,
        causal=True,
        bidirectional=True,
        cross=False,
        per_head=True,
        cost="2 * T * clusters * K + 2 * T * (T / clusters) * K",
        context=("ulysses",),
        decode=True,
        running_stats=True,
    ),
    deviations=(
        "Causal: a query sees the last `window` keys of its cluster. The paper gives each centroid its top-k tokens of "
        "the whole sequence, which depend on later tokens.",
        "Causal: queries and keys have separate projections unless the mixer's shared_qk is true, as in the paper.",
        "Every head routes; for the paper's heads, half of them local, take this core as one of `split_heads`.",
        "Packed documents are not masked from each other: data.cross_documents is true.",
    ),
)
class RoutingTransformer(Core):
    centroids: Parameter

    class Config(Core.Config):
        renamed = {"reach": "window"}

        clusters: PositiveInt = 16
        """Centroids of each head; the paper: the square root of the length."""
        window: PositiveInt = 64
        """w, causal models: keys of its cluster that a query sees, its own token's included."""
        decay: FractionBelowOne = 0.999
        """Decay of the centroids' exponential moving average at each step."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config
        self.heads = heads
        # A parameter, so that it is initialised, sharded and saved like others; `update_state` moves it, no gradient.
        self.declare(
            "centroids", (heads, config.clusters, head_width), ("heads", "state", "state"), START
        )
        self.centroids.requires_grad_(False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        centroids = self.use(self.centroids).to(upcast(q).dtype)
        q, k, values = (
            normalize_points(upcast(q)),
            repeat_kv(normalize_points(upcast(k)), q.shape[1]),
            repeat_kv(upcast(v), q.shape[1]),
        )
        if mask.causal:
            query_clusters, key_clusters = (
                centroid_scores(x.detach(), centroids).argmax(-1) for x in (q, k)
            )
            tiles = tile_buckets(query_clusters, key_clusters, self.config.window, mask)
            out = tiled_attention(
                q * q.shape[-1] ** -0.5, k, values, tiles, avoid_self=mask.shared_qk
            )
        else:
            out = self._bidirectional(q, k, values, centroids)
        if self.training and mask.stats is not None:
            points = (q.detach(), k.detach())
            sums = centroid_sums(
                centroids, self.first_head, self.heads, *points, padding=mask.key_padding
            )
            mask.stats.record(self, "found", sums)
        return out.to(v.dtype)

    @torch.no_grad()
    def update_state(self, means: dict[str, Tensor], weights: WeightWriter) -> None:
        """Update the centroids' moving average by `centroid_sums` in `means`, averaged over the step and all ranks."""
        step = (1 - self.config.decay) * centroid_target(means[f"{self.path}/found"])
        weights.update(self.centroids, lambda old, new: self.config.decay * old + new, step)

    def _bidirectional(self, q: Tensor, k: Tensor, v: Tensor, centroids: Tensor) -> Tensor:
        size = -(-k.shape[2] // len(centroids[0]))
        query_index, key_index = (
            centroid_scores(x.detach(), centroids).mT.topk(size, -1).indices for x in (q, k)
        )  # [B, H, C, W]
        rows, keys, values = (
            _take(x, at) for x, at in ((q, query_index), (k, key_index), (v, key_index))
        )  # [B, H, C, W, K]
        cluster_out = (rows @ keys.mT * q.shape[-1] ** -0.5).softmax(-1) @ values
        index = query_index.flatten(2)[..., None]
        sums = torch.zeros_like(q).scatter_add(
            2, index.expand(-1, -1, -1, q.shape[-1]), cluster_out.flatten(2, 3)
        )
        counts = q.new_zeros(*q.shape[:3], 1).scatter_add(2, index, q.new_ones(index.shape))
        return sums / counts.clamp(min=1)

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        clusters, window = self.config.clusters, min(self.config.window, keys)
        if self.causal:
            scores = tile_places(queries, keys, window) * 2 * window
            return float(heads * head_width * ((queries + keys) * clusters + 2 * scores))
        size = -(-keys // clusters)
        return float(
            heads * head_width * ((queries + keys) * clusters + 2 * clusters * size * size)
        )


def _take(x: Tensor, at: Tensor) -> Tensor:
    """Gather tokens [B, H, S, K] at indices [B, H, C, W] -> [B, H, C, W, K]."""
    taken = x.gather(2, at.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1]))
    return taken.view(*at.shape, x.shape[-1])
