"""Centroids of queries and keys (Roy et al. 2021), which follow the tokens by the gradient of the k-means loss.

The papers move them by a running mean or between epochs; as parameters they are saved, sharded and resumed like all.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.nn.auxiliary import attach

WEIGHT = 1e-2
"""Weight of the k-means loss, which reaches the centroids alone."""


def unit(x: Tensor) -> Tensor:
    """A layer norm without gain and bias: all vectors have length sqrt(K)."""
    return F.layer_norm(x, x.shape[-1:])


def nearness(x: Tensor, centroids: Tensor) -> Tensor:
    """x [B, H, S, K] of `unit` length, centroids [H, C, K] -> [B, H, S, C], the higher the nearer."""
    return x @ F.normalize(centroids, dim=-1).mT


def follow(out: Tensor, centroids: Tensor, *points: Tensor) -> Tensor:
    """`out`, whose backward also draws each point's nearest centroid to it. Points [B, H, S, K] of `unit` length."""
    losses = []
    for point in points:
        place = F.normalize(point.detach(), dim=-1)
        direction = F.normalize(centroids, dim=-1)  # [H, C, K]
        label = (place @ direction.detach().mT).argmax(-1)  # [B, H, S]
        heads = torch.arange(len(centroids), device=out.device)[None, :, None]
        # A head's own mean, so that what its centroids learn does not depend on which other heads are here.
        losses.append((place - direction[heads, label]).square().sum(-1).mean((0, 2)).sum())
    return attach(out, torch.stack(losses).sum(), WEIGHT)
