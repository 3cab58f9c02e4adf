"""Sliding windows: `window` in blocks, `band` in tokens, and `dilated`."""

import numpy as np

from xscale.core.config import NonNegativeInt, PositiveInt
from xscale.nn.pattern.grid import Grid, Index, TokenMask
from xscale.nn.pattern.pattern import PATTERNS, Layout, Pattern, PatternTraits


@PATTERNS.register(
    "window",
    traits=PatternTraits(
        causal=True, bidirectional=True, per_head_layout=False, density="min(1, window / N)"
    ),
)
class Window(Pattern):
    """Sliding window: each block sees its neighbours (Parmar et al. 2018; Beltagy et al. 2020, section 3.1)."""

    class Config(Pattern.Config):
        window: PositiveInt = 3
        """Blocks in the window, an odd number with the query's own in the middle; causal models see the left half."""

    odd_keys = ("window",)

    def make_layout(self, grid: Grid) -> Layout:
        return window_layout(grid, self.config.window)


def window_layout(grid: Grid, window: int) -> Layout:
    """[1, rows, N], true where row and column are at most window // 2 blocks apart."""
    seen: Layout = (abs(grid.row - grid.column) <= window // 2)[None]
    return seen


@PATTERNS.register(
    "band",
    traits=PatternTraits(
        causal=True,
        bidirectional=True,
        per_head_layout=False,
        density="min(1, (1 + -(-left // block) + -(-right // block)) / N)",
    ),
)
class Band(Pattern):
    """Sliding window counted in tokens: `left` keys before and `right` keys after (Beltagy et al. 2020; Guo et al.
    2022).

    `window` counts blocks; a band counts tokens, and masks keys inside the blocks at its edges.
    """

    class Config(Pattern.Config):
        left: NonNegativeInt = 127
        """Keys seen before the query's own position."""
        right: NonNegativeInt = 127
        """Keys seen after the query's own position; none in causal models."""

    def make_layout(self, grid: Grid) -> Layout:
        # The nearest tokens of two blocks at distance d are (d - 1) * block + 1 tokens apart.
        gap = (grid.row - grid.column)[None]
        before, after = (
            (gap - 1) * grid.block + 1 <= self.config.left,
            (-gap - 1) * grid.block + 1 <= self.config.right,
        )
        seen: Layout = before & after
        return seen

    def token_mask(self, grid: Grid) -> TokenMask | None:
        left, right = self.config.left, self.config.right
        return lambda i, j: (i - j <= left) & (j - i <= right)


@PATTERNS.register(
    "dilated",
    traits=PatternTraits(
        causal=True, bidirectional=True, per_head_layout=True, density="min(1, window / N)"
    ),
    deviations=(
        "Window and dilation count blocks; the paper counts tokens, as this does with blocks of one token.",
    ),
)
class Dilated(Pattern):
    """Dilated sliding window, whose dilation and width may grow with depth (Beltagy et al. 2020, section 3.1)."""

    class Config(Pattern.Config):
        renamed = {
            "gap": "dilation",
            "gap_grows": "dilation_growth",
            "window_grows": "window_growth",
            "heads": "dilated_heads",
        }

        window: PositiveInt = 5
        """Blocks in the window, the query's own in the middle; causal models see the left half."""
        dilation: PositiveInt = 2
        """Distance in blocks between seen blocks in the first layer; 1 is a plain window."""
        dilation_growth: NonNegativeInt = 0
        """Blocks added to the dilation from layer to layer."""
        window_growth: NonNegativeInt = 0
        """Blocks added to the window on each side from layer to layer."""
        dilated_heads: NonNegativeInt | None = None
        """Number of dilated heads, counted from the first; the others have a plain window. null: all heads."""

    odd_keys = ("window",)

    @property
    def differs_by_head(self) -> bool:
        return self.config.dilated_heads is not None

    def make_layout(self, grid: Grid) -> Layout:
        config = self.config
        gap: Index = np.full((1, 1, 1), config.dilation + grid.layer * config.dilation_growth)
        if self.differs_by_head:
            gap = np.where(grid.head < config.dilated_heads, gap, 1)
        reach = config.window // 2 + grid.layer * config.window_growth
        apart = (grid.row - grid.column)[None]
        seen: Layout = (apart % gap == 0) & (abs(apart) <= reach * gap)
        return seen
