"""Covers: which blocks hold tokens that share a region, for patterns laid over a plane of tokens."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from xscale.nn.pattern.grid import Grid, Index


def touched(grid: Grid, region: Callable[[Index], Index], regions: int) -> npt.NDArray[np.float32]:
    """[N, regions]: 1 where the block of the row has a token whose `region` is the column."""
    tokens = np.arange(grid.blocks * grid.block, dtype=np.int64)
    found = np.zeros((grid.blocks, regions), dtype=np.float32)
    found[tokens // grid.block, region(tokens)] = 1
    return found


def meet(grid: Grid, blocks: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """[1, rows, N], true where a region of the row's block is one of the column's."""
    rows = blocks[grid.first_row : grid.first_row + grid.rows]
    seen: npt.NDArray[np.bool_] = rows @ blocks.T > 0
    return seen[None]


def between(grid: Grid, sees: npt.NDArray[np.bool_], region: int) -> npt.NDArray[np.bool_]:
    """[1, rows, N], true where a region of the row's block `sees` [regions, regions] one of the column's.

    Regions are runs of `region` tokens, so a block touches a run of them, and sums over rectangles of `sees` tell.
    """
    sums = np.zeros((len(sees) + 1, len(sees) + 1), dtype=np.int32)
    sums[1:, 1:] = sees.cumsum(0, dtype=np.int32).cumsum(1, dtype=np.int32)
    row, column = grid.row[:, 0], grid.column[0]
    down = sums[((row + 1) * grid.block - 1) // region + 1] - sums[row * grid.block // region]  # [rows, regions + 1]
    right = down[:, ((column + 1) * grid.block - 1) // region + 1] - down[:, column * grid.block // region]
    seen: npt.NDArray[np.bool_] = right > 0
    return seen[None]
