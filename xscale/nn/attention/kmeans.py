"""Centroids of queries and keys (Roy et al. 2021), which follow the tokens: by a running mean, or by a gradient.

As parameters they are built, cut, saved and resumed like all, whichever of the two moves them.
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


def found_near(centroids: Tensor, first_head: int, heads: int, *points: Tensor) -> Tensor:
    """Of the points that are nearest to each centroid, the sum and the number, both over the mean number of a centroid.

    Centroids [h, C, K] of the heads from `first_head` on, points [B, h, S, K] of `unit` length -> [H, C, K + 1] of all
    `heads`, zero where they are not here: so ranks with other heads and with other tokens are averaged alike.
    """
    here, count, width = centroids.shape
    sums = points[0].new_zeros(here * count, width + 1)
    for point in points:
        label = nearness(point, centroids).argmax(-1)  # [B, h, S]
        at = label + torch.arange(here, device=label.device)[:, None] * count
        sums = sums.index_add(0, at.flatten(), F.pad(point, (0, 1), value=1.0).flatten(0, 2))
    each = sum(point.shape[0] * point.shape[2] for point in points) / count
    return F.pad(sums.view(here, count, -1) / each, (0, 0, 0, 0, first_head, heads - first_head - here))


def moved(found: Tensor) -> Tensor:
    """Where the points of `found_near` [H, C, K + 1], averaged over ranks and micro-batches, would draw the centroids.

    A head that some ranks do not have was averaged with zeros: its numbers, one a centroid in the mean, tell how many.
    """
    return found[..., :-1] / found[..., -1:].mean(1, keepdim=True)


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
