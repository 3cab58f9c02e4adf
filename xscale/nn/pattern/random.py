"""Random attention: each block sees a few blocks drawn once, by a seed (the random part of Zaheer et al. 2020)."""

import numpy as np
import numpy.typing as npt

from xscale.core.config import NonNegativeInt, PositiveInt
from xscale.nn.pattern.grid import Grid, Index
from xscale.nn.pattern.pattern import PATTERNS, Layout, Pattern, PatternTraits

_Bits = npt.NDArray[np.uint64]


def random_columns(grid: Grid, available: Index, count: int, seed: int) -> Index:
    """Sample `count` distinct columns below `available` [rows, 1] uniformly for each head and row: [H, rows, count].

    A row with fewer than `count` available columns gets all of them, padded with -1. Floyd's sampling, vectorised over
    rows.
    """
    shape = (grid.heads, grid.rows)
    limit = np.broadcast_to(available[:, 0], shape)
    chosen = np.full((*shape, count), -1, dtype=np.int64)
    state = _mix(
        np.uint64(seed)
        + _mix(_bits(grid.layer) + _mix(_bits(grid.head[:, :, 0]) + _mix(_bits(grid.row.T))))
    )
    for step in range(count):
        top = limit - count + step  # the largest column of this step
        drawn = (_mix(state + np.uint64(step)) % _bits(np.maximum(top + 1, 1))).astype(np.int64)
        taken = (chosen[..., :step] == drawn[..., None]).any(-1)
        value = np.where(taken, top, drawn)
        # With fewer than `count` available columns the first steps choose none, and the later ones take all.
        chosen[..., step] = np.where(top >= 0, value, -1)
    return chosen


def columns_to_layout(grid: Grid, columns: Index) -> npt.NDArray[np.bool_]:
    """Bool [H, rows, N], true at `columns` [H, rows, count]; -1 marks no column."""
    seen = np.zeros((grid.heads, grid.rows, grid.blocks + 1), dtype=np.bool_)
    np.put_along_axis(seen, np.where(columns < 0, grid.blocks, columns), True, axis=-1)
    return seen[..., : grid.blocks]


def _bits(value: int | Index) -> _Bits:
    return np.asarray(value, dtype=np.int64).astype(np.uint64)


def _mix(value: _Bits | np.uint64) -> _Bits:
    """SplitMix64 (Steele et al. 2014): every bit of the result depends on every bit of the value."""
    with np.errstate(over="ignore"):
        bits: _Bits = np.asarray(value, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return bits ^ (bits >> np.uint64(31))


@PATTERNS.register(
    "random",
    traits=PatternTraits(
        counts_blocks=True,
        causal=True,
        bidirectional=True,
        per_head_layout=True,
        density="min(1, random_blocks / N)",
        random=True,
    ),
)
class RandomPattern(Pattern):
    class Config(Pattern.Config):
        renamed = {"count": "random_blocks"}

        random_blocks: PositiveInt = 3
        """Random blocks that each block sees, different for each head and layer; causal models also see their own
        block."""
        seed: NonNegativeInt = 0
        """Seed of the random blocks."""

    @property
    def differs_by_head(self) -> bool:
        return True

    def make_layout(self, grid: Grid) -> Layout:
        free = grid.row if grid.causal else np.full_like(grid.row, grid.blocks)
        return columns_to_layout(
            grid, random_columns(grid, free, self.config.random_blocks, self.config.seed)
        )
