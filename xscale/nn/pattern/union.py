"""Patterns made of patterns: `union` and `intersection`."""

from typing import Any

from pydantic import Field

from xscale.core.errors import Problem
from xscale.nn.pattern.fixed import Strided
from xscale.nn.pattern.global_blocks import GlobalBlocks
from xscale.nn.pattern.grid import Grid, TokenMask
from xscale.nn.pattern.pattern import (
    PATTERNS,
    Layout,
    MaskedLayout,
    Pattern,
    PatternSlot,
    PatternTraits,
    check_pattern,
)
from xscale.nn.pattern.window import Window


class PatternOfPatterns(Pattern):
    """A pattern whose layout is computed from those of its `patterns`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.patterns: list[Pattern] = [PATTERNS.build(pattern) for pattern in config.patterns]

    @classmethod
    def check(cls, config: Any, dims: Any, path: str) -> list[Problem]:
        return [
            problem
            for index, pattern in enumerate(config.patterns)
            for problem in check_pattern(pattern, dims, f"{path}.patterns.{index}")
        ]

    @property
    def counts_blocks(self) -> bool:
        return any(pattern.counts_blocks for pattern in self.patterns)

    @property
    def differs_by_head(self) -> bool:
        return any(pattern.differs_by_head for pattern in self.patterns)


@PATTERNS.register(
    "union",
    traits=PatternTraits(
        causal=True, bidirectional=True, per_head_layout=True, density="min(1, 5 / N)"
    ),
)
class UnionPattern(PatternOfPatterns):
    """Union of patterns: a key is seen where any pattern shows it (compound patterns, Lin et al. 2022, section 4.1)."""

    class Config(Pattern.Config):
        renamed = {"parts": "patterns"}

        patterns: tuple[PatternSlot, ...] = Field(
            default=(Window.Config(), GlobalBlocks.Config()), min_length=1
        )
        """Patterns of which any may show a key."""

    def make_layout(self, grid: Grid) -> Layout:
        seen = self.patterns[0].layout(grid)
        for pattern in self.patterns[1:]:
            seen = seen | pattern.layout(grid)
        return seen

    def masked_layouts(self, grid: Grid) -> tuple[MaskedLayout, ...]:
        return tuple(
            (self._causal(layout, grid), token_mask)
            for pattern in self.patterns
            for layout, token_mask in pattern.masked_layouts(grid)
        )


@PATTERNS.register(
    "intersection",
    traits=PatternTraits(
        causal=True, bidirectional=True, per_head_layout=True, density="min(1, 11 / N)"
    ),
)
class IntersectionPattern(PatternOfPatterns):
    """Intersection of patterns: a key is seen where all patterns show it, such as random blocks within a wide
    window."""

    class Config(Pattern.Config):
        renamed = {"parts": "patterns"}

        patterns: tuple[PatternSlot, ...] = Field(
            default=(Window.Config(window=17), Strided.Config()), min_length=1
        )
        """Patterns that must all show a key."""

    def make_layout(self, grid: Grid) -> Layout:
        seen = self.patterns[0].layout(grid)
        for pattern in self.patterns[1:]:
            seen = seen & pattern.layout(grid)
        return seen

    def masked_layouts(self, grid: Grid) -> tuple[MaskedLayout, ...]:
        pairs = self.patterns[0].masked_layouts(grid)
        for pattern in self.patterns[1:]:
            pairs = tuple(
                (layout & other_layout, _both(token_mask, other_mask))
                for layout, token_mask in pairs
                for other_layout, other_mask in pattern.masked_layouts(grid)
            )
        return tuple((self._causal(layout, grid), token_mask) for layout, token_mask in pairs)


def _both(first: TokenMask | None, second: TokenMask | None) -> TokenMask | None:
    """Token mask that shows what both show; None shows all."""
    if first is None or second is None:
        return first or second
    return lambda i, j: first(i, j) & second(i, j)
