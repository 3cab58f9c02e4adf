"""The grid of a block layout: one row for each query block, one column for each key block.

Patterns over a 2-D grid of tokens make theirs from regions of tokens: rows, columns, rectangles.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]
TokenMask = Callable[[Any, Any], Any]
"""(query positions, key positions) -> bool, true where the query sees the key; elementwise on tensors that broadcast.
FlexAttention's `mask_mod` without batch and head."""


@dataclass(frozen=True)
class PeriodicTokenMask:
    """A token mask that stays the same when query and key both shift by `period` tokens: few blocks are evaluated."""

    rule: TokenMask
    period: int

    def __call__(self, i: Any, j: Any) -> Any:
        return self.rule(i, j)


@dataclass(frozen=True)
class Grid:
    """Shape of a layout: rows of query blocks, columns of key blocks, both counted from the start of the sequence."""

    blocks: int
    """N, key blocks of the whole sequence; the rows may cover only some of its query blocks."""
    heads: int = 1
    """H."""
    causal: bool = True
    block: int = 64
    """Tokens in a block, for patterns whose sizes are in tokens."""
    layer: int = 0
    """Index of the block in its stack: some patterns change with depth."""
    first_row: int = 0
    """Query block of the first row; while decoding, the rows before it are already computed."""
    first_head: int = 0
    """Index in the model of the first local head, when heads are sharded over ranks."""
    row_count: int | None = None
    """Number of rows; None: all rows from `first_row`."""

    @property
    def rows(self) -> int:
        return self.blocks - self.first_row if self.row_count is None else self.row_count

    @cached_property
    def row(self) -> Index:
        """[rows, 1]."""
        return np.arange(self.first_row, self.first_row + self.rows, dtype=np.int64)[:, None]

    @cached_property
    def column(self) -> Index:
        """[1, N]."""
        return np.arange(self.blocks, dtype=np.int64)[None, :]

    @cached_property
    def head(self) -> Index:
        """[H, 1, 1]."""
        return np.arange(self.first_head, self.first_head + self.heads, dtype=np.int64)[
            :, None, None
        ]


def regions_of_blocks(
    grid: Grid, region: Callable[[Index], Index], regions: int
) -> npt.NDArray[np.float32]:
    """[N, regions], 1 where the block has a token of the region; `region` maps token positions to region numbers."""
    tokens = np.arange(grid.blocks * grid.block, dtype=np.int64)
    touches = np.zeros((grid.blocks, regions), dtype=np.float32)
    touches[tokens // grid.block, region(tokens)] = 1
    return touches


def shared_region_layout(grid: Grid, blocks: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """[1, rows, N], true where the query block and the key block have a region in common.

    `blocks` [N, regions] comes from `regions_of_blocks`.
    """
    rows = blocks[grid.first_row : grid.first_row + grid.rows]
    seen: npt.NDArray[np.bool_] = rows @ blocks.T > 0
    return seen[None]


def region_layout(grid: Grid, sees: npt.NDArray[np.bool_], region: int) -> npt.NDArray[np.bool_]:
    """[1, rows, N], true where a region of the query block sees a region of the key block.

    `sees` [regions, regions] says which region sees which. A region is `region` consecutive tokens, so a block overlaps
    consecutive regions, and a summed-area table of `sees` counts the visible pairs.
    """
    sums = np.zeros((len(sees) + 1, len(sees) + 1), dtype=np.int32)
    sums[1:, 1:] = sees.cumsum(0, dtype=np.int32).cumsum(1, dtype=np.int32)
    row, column = grid.row[:, 0], grid.column[0]
    down = (
        sums[((row + 1) * grid.block - 1) // region + 1] - sums[row * grid.block // region]
    )  # [rows, regions + 1]
    right = (
        down[:, ((column + 1) * grid.block - 1) // region + 1]
        - down[:, column * grid.block // region]
    )
    seen: npt.NDArray[np.bool_] = right > 0
    return seen[None]
