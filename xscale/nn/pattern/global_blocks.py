"""Blocks or tokens that see all and are seen by all: `global_blocks`, and `star` with one such block."""

from typing import Any

import numpy as np

from xscale.core.config import PositiveInt
from xscale.nn.pattern.grid import Grid, TokenMask
from xscale.nn.pattern.pattern import (
    PATTERNS,
    BlockIndex,
    Layout,
    MaskedLayout,
    Pattern,
    PatternTraits,
    TokenIndex,
)


@PATTERNS.register(
    "global_blocks",
    aliases=("hub",),
    traits=PatternTraits(
        causal=True,
        bidirectional=True,
        per_head_layout=False,
        density="min(1, (len(global_block_indices) + len(global_token_indices)) * (1 + horizontal_global) / N)",
    ),
)
class GlobalBlocks(Pattern):
    """Global attention: chosen blocks or tokens see all and are seen by all; other pairs are masked (Ainslie et al.
    2020).

    Combine it with a window in `union` to build the patterns of ETC and Longformer.
    """

    class Config(Pattern.Config):
        renamed = {
            "places": "global_block_indices",
            "rows": "horizontal_global",
        }

        global_block_indices: tuple[BlockIndex, ...] = (0,)
        """Indices of the global blocks; those beyond the end of the sequence are ignored."""
        global_token_indices: tuple[TokenIndex, ...] = ()
        """Indices of single global tokens, whose neighbours in the block are not global."""
        horizontal_global: bool = True
        """Whether global blocks and tokens also see all tokens (their own past, in causal models)."""

    def make_layout(self, grid: Grid) -> Layout:
        seen = self._block_layout(grid)
        if self.config.global_token_indices:
            seen = (
                seen
                | global_tokens(
                    grid, self.config.global_token_indices, self.config.horizontal_global
                )[0]
            )
        return seen

    def masked_layouts(self, grid: Grid) -> tuple[MaskedLayout, ...]:
        blocks = (self._causal(self._block_layout(grid), grid), None)
        if not self.config.global_token_indices:
            return (blocks,)
        layout, mask = global_tokens(
            grid, self.config.global_token_indices, self.config.horizontal_global
        )
        tokens = (self._causal(layout, grid), mask)
        return (blocks, tokens) if self.config.global_block_indices else (tokens,)

    def _block_layout(self, grid: Grid) -> Layout:
        places = np.asarray(self.config.global_block_indices, dtype=np.int64)
        seen: Layout = np.isin(grid.column, places) | (
            np.isin(grid.row, places) & self.config.horizontal_global
        )
        return seen[None]


def global_tokens(
    grid: Grid, indices: tuple[int, ...], horizontal: bool = True
) -> tuple[Layout, TokenMask]:
    """Layout [1, rows, N] and mask of single global tokens, at `indices`; `horizontal`: they also see all tokens.

    In causal models each token also sees itself.
    """
    blocks = np.asarray(indices, dtype=np.int64) // grid.block
    layout: Layout = (np.isin(grid.column, blocks) | (np.isin(grid.row, blocks) & horizontal))[None]

    def token_mask(i: Any, j: Any) -> Any:
        seen = (i == j) & grid.causal
        for index in indices:
            seen = seen | (j == index) | ((i == index) & horizontal)
        return seen

    return layout, token_mask


@PATTERNS.register(
    "star",
    traits=PatternTraits(
        counts_blocks=True,
        causal=False,
        bidirectional=True,
        per_head_layout=False,
        density="min(1, (window + 2) / N)",
    ),
    deviations=(
        "The ring and the relay are blocks of tokens; with blocks of one token they are the paper's nodes.",
        "Only who sees whom is Star-Transformer's: its update, weights and depth are those of the mixer `star`.",
    ),
)
class Star(Pattern):
    """Guo et al. 2019 (Star-Transformer): a ring in which each block sees its neighbours, and one relay that all
    see."""

    class Config(Pattern.Config):
        window: PositiveInt = 3
        """Blocks of the ring that a block sees, its own in the middle; an odd number."""

    odd_keys = ("window",)

    def make_layout(self, grid: Grid) -> Layout:
        # Block 0 is the relay; the ring closes over the others.
        ring = max(1, grid.blocks - 1)
        apart = (grid.row - grid.column) % ring
        reach = self.config.window // 2
        seen: Layout = (
            (apart <= reach) | (apart >= ring - reach) | (grid.row == 0) | (grid.column == 0)
        )
        return seen[None]
