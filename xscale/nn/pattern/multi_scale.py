"""Guo et al. 2020 (Multi-Scale Transformer): heads have windows of several scales, whose numbers change with depth.

A head of scale w sees the tokens at a distance of at most w / 2. Layer l, from 1, has n^l_k heads of scale k, from 1:

    n^l = H softmax(z^l),  z^l_|scales| = 0,  z^l_k = z^l_{k+1} + alpha / l

so that lower layers have more heads of small scales, and high layers about as many of each.
"""

import math
from typing import Any

import numpy as np
from pydantic import Field

from xscale.core.config import NonNegativeFloat, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.pattern.grid import Grid, Index, TokenMask
from xscale.nn.pattern.pattern import PATTERNS, Layout, MaskedLayout, Pattern, PatternTraits


@PATTERNS.register(
    "multi_scale",
    traits=PatternTraits(
        causal=True,
        bidirectional=True,
        per_head_layout=True,
        density="sum(2.718281828 ** (alpha * (len(scales) - 1 - k)) * min(1, (1 + 2 * -(-(scale // 2) // block)) / N) "
        "for k, scale in enumerate(scales)) / sum(2.718281828 ** (alpha * k) for k in range(len(scales)))",
    ),
    deviations=(
        "The numbers of heads are rounded by Sainte-Laguë's method, head after head, so that the scale of a head does "
        "not depend on the heads behind it.",
    ),
)
class MultiScale(Pattern):
    class Config(Pattern.Config):
        scales: tuple[PositiveInt, ...] = Field(default=(1, 3, 16, 32, 64), min_length=1)
        """Scales in tokens, ascending: 2 * (scale // 2) + 1 tokens are seen, the query's own in the middle; causal
        models see the left half. The paper has 1, 3, N/16, N/8 and N/4 for sequences of N tokens."""
        alpha: NonNegativeFloat = 0.6
        """How much lower layers prefer small scales; with 0 all layers have as many heads of each scale."""

    @classmethod
    def check(cls, config: Config, dims: Any, path: str) -> list[Problem]:
        ascending = sorted(set(config.scales))
        if list(config.scales) == ascending:
            return []
        what = f"must ascend, from the scale of which low layers have most heads, got {list(config.scales)}"
        return [Problem(f"{path}.scales", what, choices=take(ascending))]

    @property
    def differs_by_head(self) -> bool:
        return True

    def make_layout(self, grid: Grid) -> Layout:
        # The nearest tokens of two blocks at distance d are (d - 1) * block + 1 tokens apart.
        gap = (abs(grid.row - grid.column)[None] - 1) * grid.block + 1
        seen: Layout = gap <= self._scale_of_heads(grid) // 2
        return seen

    def masked_layouts(self, grid: Grid) -> tuple[MaskedLayout, ...]:
        layout, scale_of_heads = self.layout(grid), self._scale_of_heads(grid)
        return tuple(
            (layout & (scale_of_heads == scale), _within(scale // 2))
            for scale in self.config.scales
            if (scale_of_heads == scale).any()
        )

    def _scale_of_heads(self, grid: Grid) -> Index:
        """Scale of each local head, [H, 1, 1]."""
        config = self.config
        scales = head_scales(config.scales, config.alpha, grid.layer, grid.first_head + grid.heads)
        return np.array(scales[grid.first_head :], dtype=np.int64)[:, None, None]


def _within(reach: int) -> TokenMask:
    return lambda i, j: (i - j <= reach) & (j - i <= reach)


def head_scales(scales: tuple[int, ...], alpha: float, layer: int, heads: int) -> tuple[int, ...]:
    """Return the scale of each head of layer `layer`, counted from 0."""
    step = alpha / (layer + 1)
    # Relative to the largest, so that no exponential overflows.
    weights = [math.exp(-step * index) for index in range(len(scales))]
    counts, assigned = [0] * len(scales), []
    for _ in range(heads):
        index = max(range(len(scales)), key=lambda k: weights[k] / (counts[k] + 0.5))
        counts[index] += 1
        assigned.append(scales[index])
    return tuple(assigned)
