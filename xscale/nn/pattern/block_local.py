"""Blocks of the sequence that see one block: themselves (`block_local`), or another in each head (`blockwise`)."""

import numpy as np
from pydantic import Field

from xscale.core.config import NonNegativeInt, PositiveInt
from xscale.nn.pattern.grid import Grid
from xscale.nn.pattern.pattern import PATTERNS, Layout, Pattern, PatternTraits


@PATTERNS.register(
    "block_local",
    traits=PatternTraits(
        causal=True,
        bidirectional=True,
        per_head_layout=False,
        density="min(1, local_blocks * (1 + 2 * overlap) / N)",
    ),
)
class BlockLocal(Pattern):
    """Block-local attention: the sequence is split into spans, and a span sees only itself (Liu et al. 2018)."""

    class Config(Pattern.Config):
        renamed = {"span": "local_blocks"}

        local_blocks: PositiveInt = 4
        """Blocks in a span."""
        overlap: NonNegativeInt = 0
        """Neighbouring spans on each side that a span also sees; 1 is the baseline of Xiong et al. 2022."""

    def make_layout(self, grid: Grid) -> Layout:
        seen: Layout = (
            abs(grid.row // self.config.local_blocks - grid.column // self.config.local_blocks)
            <= self.config.overlap
        )
        return seen[None]


@PATTERNS.register(
    "blockwise",
    traits=PatternTraits(
        counts_blocks=True,
        causal=False,
        bidirectional=True,
        per_head_layout=True,
        density="1 / sequence_blocks",
    ),
)
class Blockwise(Pattern):
    """Qiu et al. 2020 (BlockBERT): the sequence in n blocks; each head permutes them, and block i sees block pi(i)."""

    class Config(Pattern.Config):
        renamed = {"pieces": "sequence_blocks"}

        sequence_blocks: PositiveInt = 4
        """n, blocks of the whole sequence (a multiple of the core's blocks)."""
        shifts: tuple[int, ...] = Field(default=(0, 0, 0, 1), min_length=1)
        """Permutations, taken in turn by the heads: in a head of shift s, block i sees block (i + s) mod n."""

    @property
    def differs_by_head(self) -> bool:
        return len(set(self.config.shifts)) > 1

    def make_layout(self, grid: Grid) -> Layout:
        size = -(-grid.blocks // self.config.sequence_blocks)
        # A short sequence fills fewer than n blocks, and the shift wraps around at the last filled one.
        filled = -(-grid.blocks // size)
        shifts = np.asarray(self.config.shifts)[
            (grid.head if self.differs_by_head else grid.head[:1]) % len(self.config.shifts)
        ]
        seen: Layout = (grid.row // size + shifts) % filled == grid.column // size
        return seen
