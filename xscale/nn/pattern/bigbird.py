"""Zaheer et al. 2020 (BigBird, internal construction): a sliding window, random blocks, and global blocks."""

from typing import Any

import numpy as np

from xscale.core.config import NonNegativeInt, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.pattern.grid import Grid
from xscale.nn.pattern.pattern import PATTERNS, Layout, Pattern, PatternTraits
from xscale.nn.pattern.random import columns_to_layout, random_columns
from xscale.nn.pattern.window import window_layout


@PATTERNS.register(
    "bigbird",
    traits=PatternTraits(
        counts_blocks=True,
        causal=True,
        bidirectional=True,
        per_head_layout=True,
        density="min(1, (window + random_blocks + 2 * global_blocks + 2 * global_blocks_at_end) / N)",
        random=True,
    ),
)
class BigBirdPattern(Pattern):
    class Config(Pattern.Config):
        renamed = {"global_end": "global_blocks_at_end"}

        window: PositiveInt = 3
        """Blocks in the window, the query's own in the middle."""
        random_blocks: NonNegativeInt = 1
        """Random blocks that each block sees besides the window and the global blocks; each head and layer has its
        own."""
        global_blocks: NonNegativeInt = 1
        """Global blocks at the start of the sequence: they see all blocks and are seen by all."""
        global_blocks_at_end: NonNegativeInt = 0
        """Global blocks at the end of the sequence (the paper: as many as at the start); bidirectional models only."""
        seed: NonNegativeInt = 0
        """Seed of the random blocks."""

    odd_keys = ("window",)

    @classmethod
    def check(cls, config: Config, dims: Any, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        if config.global_blocks_at_end and dims is not None and dims.causal and not dims.cross:
            what = "a causal model cannot attend to blocks at the end of the sequence"
            problems.append(Problem(f"{path}.global_blocks_at_end", what, choices=take(0)))
        return problems

    @property
    def differs_by_head(self) -> bool:
        return bool(self.config.random_blocks)

    def make_layout(self, grid: Grid) -> Layout:
        config = self.config
        first, last = config.global_blocks, grid.blocks - config.global_blocks_at_end
        seen: Layout = (
            window_layout(grid, config.window) | (grid.row < first) | (grid.column < first)
        )
        if not grid.causal:
            seen = seen | (grid.row >= last) | (grid.column >= last)
        if not config.random_blocks:
            return seen
        # Random blocks come from the columns between the global blocks, except the window: [first, left), [right, end).
        end = grid.row * 0 if grid.causal else np.maximum(grid.row * 0 + last, first)
        left = np.clip(
            grid.row - config.window // 2, first, None if grid.causal else np.maximum(end, first)
        )
        right = np.minimum(np.maximum(grid.row + config.window // 2 + 1, first), end)
        free = np.maximum(left - first, 0) + np.maximum(end - right, 0)
        chosen = random_columns(grid, free, config.random_blocks, config.seed)
        places = chosen + first
        places = np.where(
            places >= left.T[..., None], places - left.T[..., None] + right.T[..., None], places
        )
        return seen | columns_to_layout(grid, np.where(chosen < 0, -1, places))
