"""Beltagy et al. 2020 (Longformer): a sliding window, and global blocks or tokens that see all and are seen by all.

The layout is that of DeepSpeed's documented `BSLongformerSparsityConfig`, block for block. The pattern `band` is a
window in tokens. The mixer `longformer` has the paper's second projections for the global tokens.
"""

from xscale.core.config import PositiveInt
from xscale.nn.pattern.global_blocks import global_tokens
from xscale.nn.pattern.grid import Grid
from xscale.nn.pattern.pattern import (
    PATTERNS,
    BlockIndex,
    Layout,
    MaskedLayout,
    Pattern,
    PatternTraits,
    TokenIndex,
)
from xscale.nn.pattern.window import window_layout


@PATTERNS.register(
    "longformer",
    traits=PatternTraits(
        causal=True,
        bidirectional=True,
        per_head_layout=False,
        density="min(1, (window + 2 * (len(global_block_indices) + len(global_token_indices))) / N)",
    ),
    deviations=(
        "The window counts blocks, in which each token sees all tokens.",
        "Global tokens have the projections of the others; the mixer `longformer` has their own.",
    ),
)
class LongformerPattern(Pattern):
    class Config(Pattern.Config):
        renamed = {"global_blocks": "global_block_indices"}

        window: PositiveInt = 3
        """Blocks in the window, the query's own in the middle."""
        global_block_indices: tuple[BlockIndex, ...] = (0,)
        """Indices of the global blocks; those beyond the end of the sequence are ignored."""
        global_token_indices: tuple[TokenIndex, ...] = ()
        """Indices of single global tokens, whose neighbours in the block are not global."""

    odd_keys = ("window",)

    def make_layout(self, grid: Grid) -> Layout:
        seen = self._block_layout(grid)
        tokens = self.config.global_token_indices
        return seen | global_tokens(grid, tokens)[0] if tokens else seen

    def masked_layouts(self, grid: Grid) -> tuple[MaskedLayout, ...]:
        blocks = (self._causal(self._block_layout(grid), grid), None)
        if not self.config.global_token_indices:
            return (blocks,)
        layout, mask = global_tokens(grid, self.config.global_token_indices)
        return blocks, (self._causal(layout, grid), mask)

    def _block_layout(self, grid: Grid) -> Layout:
        seen = window_layout(grid, self.config.window)
        for index in self.config.global_block_indices:
            seen = seen | (grid.row == index) | (grid.column == index)
        return seen
