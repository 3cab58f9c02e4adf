"""k-means centroids of queries and keys (Roy et al. 2021) or of hidden states (Wang et al. 2021), without a gradient.

They are parameters: initialised, sharded, saved and resumed like all others.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def normalize_points(x: Tensor) -> Tensor:
    """Layer norm without gain and bias: every vector [..., K] gets length sqrt(K)."""
    return F.layer_norm(x, x.shape[-1:])


def centroid_scores(x: Tensor, centroids: Tensor) -> Tensor:
    """Similarity of normalised points to centroids: x [B, H, S, K], centroids [H, C, K] -> [B, H, S, C]."""
    return x @ F.normalize(centroids, dim=-1).mT


def centroid_sums(
    centroids: Tensor, first_head: int, heads: int, *points: Tensor, padding: Tensor | None = None
) -> Tensor:
    """Sum and number of the points nearest to each centroid, both divided by the mean number of points per centroid.

    Centroids [h, C, K] of the local heads (from `first_head`), normalised points [B, h, S, K] -> [H, C, K + 1] of all
    `heads`, zero for heads of other ranks: so one mean over ranks serves ranks with other heads and other tokens.
    Points of `padding` [B, S] belong to no cluster.
    """
    local_heads, count, width = centroids.shape
    sums = points[0].new_zeros(local_heads * count, width + 1)
    for point in points:
        label = centroid_scores(point, centroids).argmax(-1)  # [B, h, S]
        index = label + torch.arange(local_heads, device=label.device)[:, None] * count
        counted = F.pad(point, (0, 1), value=1.0)
        if padding is not None:
            counted = counted * ~padding[:, None, :, None]
        sums = sums.index_add(0, index.flatten(), counted.flatten(0, 2))
    # Each head has all points.
    mean_size = (sums[..., -1].sum() / (local_heads * count)).clamp(min=1e-9)
    other_heads = (0, 0, 0, 0, first_head, heads - first_head - local_heads)
    return F.pad(sums.view(local_heads, count, -1) / mean_size, other_heads)


def centroid_target(mean_sums: Tensor) -> Tensor:
    """Target of the centroids' running mean [H, C, K], from `centroid_sums` averaged over ranks and micro-batches.

    A head that some ranks do not have was averaged with zeros. Its counts have mean 1 per centroid on each rank that
    has it, so dividing by their mean undoes that.
    """
    return mean_sums[..., :-1] / mean_sums[..., -1:].mean(1, keepdim=True)


def chain_centroids(centroids: Tensor) -> Tensor:
    """Order the centroids of each head [H, C, K] in a chain: the first, then always the nearest of those left."""
    directions = F.normalize(centroids, dim=-1)
    heads = torch.arange(len(centroids), device=centroids.device)
    left = torch.ones(centroids.shape[:2], dtype=torch.bool, device=centroids.device)
    order = [torch.zeros_like(heads)]
    for _ in range(centroids.shape[1] - 1):
        left[heads, order[-1]] = False
        similarity = (directions @ directions[heads, order[-1], :, None])[..., 0]  # [H, C]
        order.append(similarity.masked_fill(~left, float("-inf")).argmax(-1))
    return centroids[heads[:, None], torch.stack(order, 1)]
