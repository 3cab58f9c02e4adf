"""Parmar et al. 2018 (Image Transformer), local attention in images: `image_1d` and `image_2d`."""

from typing import Any

import numpy as np

from xscale.core.config import NonNegativeInt, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import must_divide
from xscale.nn.pattern.grid import Grid, TokenMask, region_layout
from xscale.nn.pattern.pattern import PATTERNS, Layout, Pattern, PatternTraits


@PATTERNS.register(
    "image_1d",
    traits=PatternTraits(
        causal=True,
        bidirectional=True,
        per_head_layout=False,
        density="min(1, max(1, (query_length + memory_length) / block) / N)",
    ),
)
class Image1d(Pattern):
    """Parmar et al. 2018 (Image Transformer), 1-D local attention: a query block sees itself and the memory before
    it."""

    class Config(Pattern.Config):
        renamed = {"query": "query_length", "memory": "memory_length"}

        query_length: PositiveInt = 256
        """l_q, tokens of a query block: pixels in raster order, each channel a token."""
        memory_length: NonNegativeInt = 256
        """l_m, tokens before the query block that all its queries see besides their own block."""

    def make_layout(self, grid: Grid) -> Layout:
        query = self.config.query_length
        memory = self.config.memory_length
        block = grid.block
        first = grid.row * block // query * query - memory
        end = ((grid.row + 1) * block - 1) // query * query + query
        seen: Layout = (grid.column * block < end) & ((grid.column + 1) * block > first)
        return seen[None]

    def token_mask(self, grid: Grid) -> TokenMask | None:
        query, memory = self.config.query_length, self.config.memory_length

        def sees(i: Any, j: Any) -> Any:
            start = i // query * query
            return (j >= start - memory) & (j < start + query)

        return sees


@PATTERNS.register(
    "image_2d",
    traits=PatternTraits(
        causal=True,
        bidirectional=True,
        per_head_layout=False,
        density="min(1, 2 * (3 - 2 * query_width / width) * max(1, query_width * query_height / block) / N)",
    ),
)
class Image2d(Pattern):
    """Parmar et al. 2018 (Image Transformer), 2-D local attention: a rectangle of queries and the memory around it.

    Tokens are in generation order: rectangle by rectangle in raster order, and in raster order inside each
    rectangle.
    """

    class Config(Pattern.Config):
        width: PositiveInt = 64
        """Tokens in a row of the image."""
        query_width: PositiveInt = 8
        """Tokens in a row of a query rectangle; divides the image's width."""
        query_height: PositiveInt = 8
        """Rows of a query rectangle."""
        memory_width: NonNegativeInt = 4
        """Columns of memory on the left and on the right of the rectangle."""
        memory_height: NonNegativeInt = 4
        """Rows of memory above it."""

    @classmethod
    def check(cls, config: Config, dims: Any, path: str) -> list[Problem]:
        return must_divide(path, "query_width", config.query_width, "width", config.width)

    def make_layout(self, grid: Grid) -> Layout:
        config = self.config
        area, across = config.query_width * config.query_height, config.width // config.query_width
        count = -(-grid.blocks * grid.block // area)
        rectangle = np.arange(count, dtype=np.int32)
        down = (rectangle[:, None] // across - rectangle[None] // across) * config.query_height
        right = abs(rectangle[:, None] % across - rectangle[None] % across) * config.query_width
        # A rectangle overlaps the memory when fewer rows or columns are between them than the memory has.
        near = (down >= 0) & (down - config.query_height < config.memory_height)
        near &= right - config.query_width < config.memory_width
        return region_layout(grid, near, area)

    def token_mask(self, grid: Grid) -> TokenMask | None:
        config = self.config
        area, across = config.query_width * config.query_height, config.width // config.query_width

        def corner(token: Any) -> tuple[Any, Any]:
            rectangle = token // area
            return (
                rectangle // across * config.query_height,
                rectangle % across * config.query_width,
            )

        def sees(i: Any, j: Any) -> Any:
            (top, left), (y, x) = corner(i), corner(j)
            y, x = y + j % area // config.query_width, x + j % area % config.query_width
            rows = (y >= top - config.memory_height) & (y < top + config.query_height)
            end = left + config.query_width + config.memory_width
            return rows & (x >= left - config.memory_width) & (x < end)

        return sees
