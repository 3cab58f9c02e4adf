"""Local spans of different sizes and ranges of global blocks: DeepSpeed's documented `VariableSparsityConfig`.

For its random blocks, combine this pattern with `random` in `union`.
"""

from typing import Any

import numpy as np
from pydantic import Field

from xscale.core.config import PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.pattern.grid import Grid
from xscale.nn.pattern.pattern import PATTERNS, BlockIndex, Layout, Pattern, PatternTraits


@PATTERNS.register(
    "variable",
    traits=PatternTraits(
        causal=True,
        bidirectional=True,
        per_head_layout=False,
        density="min(1, (local_window_blocks[-1] + len(global_block_indices) * (1 + horizontal_global)) / N)",
    ),
)
class Variable(Pattern):
    class Config(Pattern.Config):
        renamed = {
            "spans": "local_window_blocks",
            "global_blocks": "global_block_indices",
            "global_ends": "global_block_end_indices",
            "global_rows": "horizontal_global",
        }

        local_window_blocks: tuple[PositiveInt, ...] = Field(default=(2, 4), min_length=1)
        """Blocks in each local span from the start; the last number holds for all further spans."""
        global_block_indices: tuple[BlockIndex, ...] = (0,)
        """Indices of the global blocks; with `global_block_end_indices`, the first block of each global range."""
        global_block_end_indices: tuple[PositiveInt, ...] | None = None
        """End (exclusive) of each global range; null: ranges of one block."""
        horizontal_global: bool = False
        """Whether global blocks also see all blocks; bidirectional models only."""

    @classmethod
    def check(cls, config: Config, dims: Any, path: str) -> list[Problem]:
        problems = []
        ends = config.global_block_end_indices
        if ends is not None and (
            len(ends) != len(config.global_block_indices)
            or any(
                end <= first for first, end in zip(config.global_block_indices, ends, strict=True)
            )
        ):
            what = f"must have one end after each of the {len(config.global_block_indices)} global_block_indices"
            problems.append(
                Problem(
                    f"{path}.global_block_end_indices",
                    what,
                    "Ranges are then of one block.",
                    choices=take(None),
                )
            )
        if config.horizontal_global and dims is not None and dims.causal and not dims.cross:
            what = "global blocks of a causal model cannot attend to later blocks"
            problems.append(Problem(f"{path}.horizontal_global", what, choices=take(False)))
        return problems

    def make_layout(self, grid: Grid) -> Layout:
        config = self.config
        first = sum(config.local_window_blocks[:-1])
        starts = np.concatenate(
            ([0], np.cumsum(config.local_window_blocks[:-1], dtype=np.int64), [first])
        )
        block = np.arange(grid.blocks, dtype=np.int64)
        # The number of the span that a block is in.
        span = (
            np.searchsorted(starts[1:-1], block, side="right")
            + np.maximum(block - first, 0) // config.local_window_blocks[-1]
        )
        ends = config.global_block_end_indices or tuple(
            begin + 1 for begin in config.global_block_indices
        )
        seen: Layout = span[grid.row] == span[grid.column]
        for begin, end in zip(config.global_block_indices, ends, strict=True):
            seen = seen | ((grid.column >= begin) & (grid.column < end))
            if config.horizontal_global:
                seen = seen | ((grid.row >= begin) & (grid.row < end))
        return seen[None]
