"""Attention over a 2-D grid of tokens in raster order: `axial`, `ccnet` and `local_2d`."""

from typing import Any, Literal

from xscale.core.config import PositiveInt
from xscale.nn.pattern.grid import (
    Grid,
    PeriodicTokenMask,
    TokenMask,
    regions_of_blocks,
    shared_region_layout,
)
from xscale.nn.pattern.pattern import PATTERNS, Layout, Pattern, PatternTraits

CAUSAL_ALTERNATIVE = "the mixer axial, in which a token reaches all earlier ones"
"""A raster mask on rows and columns hides all that is above and to the right of a token, however many layers there
are."""


@PATTERNS.register(
    "axial",
    traits=PatternTraits(
        causal=False,
        bidirectional=True,
        per_head_layout=False,
        density="min(1, max(1, width / block) / N)",
    ),
)
class Axial(Pattern):
    """Ho et al. 2019 (Axial Transformer), bidirectional: tokens form a 2-D grid in raster order; a token sees its row
    or its column."""

    causal_alternative = CAUSAL_ALTERNATIVE

    class Config(Pattern.Config):
        width: PositiveInt = 64
        """Tokens in a row of the grid."""
        axis: Literal["row", "column", "alternate"] = "row"
        """Axis along which a token attends; alternate: rows in even layers, columns in odd ones."""

    def _rows(self, grid: Grid) -> bool:
        return bool(
            self.config.axis == "row" or (self.config.axis == "alternate" and grid.layer % 2 == 0)
        )

    def make_layout(self, grid: Grid) -> Layout:
        return (
            row_layout(grid, self.config.width)
            if self._rows(grid)
            else column_layout(grid, self.config.width)
        )

    def token_mask(self, grid: Grid) -> TokenMask | None:
        width = self.config.width
        if self._rows(grid):
            return lambda i, j: i // width == j // width
        return lambda i, j: i % width == j % width


def row_layout(grid: Grid, width: int) -> Layout:
    """[1, rows, N], true where two blocks hold tokens of the same row of the 2-D grid."""
    first, last = grid.row * grid.block // width, ((grid.row + 1) * grid.block - 1) // width
    seen: Layout = (grid.column * grid.block // width <= last) & (
        ((grid.column + 1) * grid.block - 1) // width >= first
    )
    return seen[None]


def column_layout(grid: Grid, width: int) -> Layout:
    """[1, rows, N], true where two blocks hold tokens of the same column of the 2-D grid."""
    return shared_region_layout(grid, regions_of_blocks(grid, lambda token: token % width, width))


@PATTERNS.register(
    "ccnet",
    traits=PatternTraits(
        causal=False,
        bidirectional=True,
        per_head_layout=False,
        density="min(1, max(1, width / block) / N + max(1 / N, min(1, block / width)))",
    ),
    deviations=(
        "Each block has its own weights; the paper's two passes share them. Queries and keys have as many channels as "
        "values; the paper's have an eighth.",
    ),
)
class CcNet(Pattern):
    """Huang et al. 2019 (CCNet): criss-cross attention over a 2-D grid of tokens: a token sees its row and its
    column."""

    causal_alternative = CAUSAL_ALTERNATIVE

    class Config(Pattern.Config):
        width: PositiveInt = 1024
        """Tokens in a row of the grid."""

    def make_layout(self, grid: Grid) -> Layout:
        return row_layout(grid, self.config.width) | column_layout(grid, self.config.width)

    def token_mask(self, grid: Grid) -> TokenMask | None:
        width = self.config.width
        return PeriodicTokenMask(
            lambda i, j: (i // width == j // width) | (i % width == j % width), width
        )


@PATTERNS.register(
    "local_2d",
    aliases=("neighbours",),
    traits=PatternTraits(
        causal=True,
        bidirectional=True,
        per_head_layout=False,
        density="min(N, 1 + 2 * -(-(kernel_size // 2 * width + kernel_size // 2) // block), 3 * kernel_size) / N",
    ),
)
class Local2d(Pattern):
    """Ramachandran et al. 2019 (stand-alone self-attention): a square of neighbours on a 2-D grid in raster order."""

    class Config(Pattern.Config):
        renamed = {"side": "kernel_size"}

        width: PositiveInt = 64
        """Tokens in a row of the grid."""
        kernel_size: PositiveInt = 7
        """k, side of the square with the query in its middle; an odd number."""

    odd_keys = ("kernel_size",)

    def make_layout(self, grid: Grid) -> Layout:
        reach, block = self.config.kernel_size // 2, grid.block
        seen: Layout = grid.row < grid.column * 0
        for down in range(-reach, reach + 1):
            # The tokens that a block sees in the row of the grid `down` rows below it: [first, end).
            first = grid.row * block + down * self.config.width - reach
            end = (grid.row + 1) * block + down * self.config.width + reach
            seen = seen | ((grid.column * block < end) & ((grid.column + 1) * block > first))
        return seen[None]

    def token_mask(self, grid: Grid) -> TokenMask | None:
        width, reach = self.config.width, self.config.kernel_size // 2

        def sees(i: Any, j: Any) -> Any:
            return (abs(i // width - j // width) <= reach) & (abs(i % width - j % width) <= reach)

        return PeriodicTokenMask(sees, width)
