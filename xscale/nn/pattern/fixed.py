"""Child et al. 2019 (Sparse Transformer): `fixed` and `strided`."""

from typing import Any, Literal

import numpy as np

from xscale.core.config import NonNegativeInt, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import change, take
from xscale.nn.pattern.grid import Grid, Index
from xscale.nn.pattern.pattern import PATTERNS, Layout, Pattern, PatternTraits


@PATTERNS.register(
    "fixed",
    traits=PatternTraits(
        counts_blocks=True,
        causal=True,
        bidirectional=True,
        per_head_layout=True,
        density="min(1, local_blocks / N + (1 - local_blocks / N) * global_blocks / local_blocks) if heads == 'merged' "
        "else (min(1, local_blocks / N) + global_blocks / local_blocks) / 2",
    ),
    deviations=(
        "With split heads odd ones see their own block too, without which the first span would see nothing.",
    ),
)
class Fixed(Pattern):
    """Child et al. 2019 (Sparse Transformer), the fixed pattern: local spans whose last blocks are global.

    The layout is that of DeepSpeed's documented `FixedSparsityConfig`, block for block.
    """

    class Config(Pattern.Config):
        renamed = {
            "span": "local_blocks",
            "global_rows": "horizontal_global",
        }

        local_blocks: PositiveInt = 4
        """Blocks in a local span: its blocks see each other."""
        global_blocks: NonNegativeInt = 1
        """Blocks at the end of each span that every block sees."""
        global_patterns: PositiveInt = 1
        """Different choices of global blocks inside a span (counted from its end), taken in turn by the heads."""
        horizontal_global: bool = False
        """Whether global blocks also see all blocks; bidirectional models only."""
        heads: Literal["merged", "split"] = "merged"
        """merged: each head sees spans and global blocks; split: even heads the spans, odd ones the global blocks."""

    @classmethod
    def check(cls, config: Config, dims: Any, path: str) -> list[Problem]:
        problems = []
        if config.global_blocks * config.global_patterns > config.local_blocks:
            what = (
                f"global_blocks={config.global_blocks} times global_patterns={config.global_patterns} "
                f"exceeds local_blocks={config.local_blocks}"
            )
            problems.append(
                Problem(
                    f"{path}.global_blocks",
                    what,
                    choices=change(("", 1), (f"{path}.global_patterns", 1)),
                )
            )
        if config.horizontal_global and dims is not None and dims.causal and not dims.cross:
            what = "global blocks of a causal model cannot attend to later blocks"
            problems.append(Problem(f"{path}.horizontal_global", what, choices=take(False)))
        return problems

    @property
    def differs_by_head(self) -> bool:
        return bool(self.config.global_patterns > 1 or self.config.heads == "split")

    def make_layout(self, grid: Grid) -> Layout:
        config = self.config
        head = grid.head if self.differs_by_head else np.zeros((1, 1, 1), dtype=np.int64)
        choice = (
            head % config.global_patterns
            if config.heads == "merged"
            else head // 2 % config.global_patterns
        )
        start = (
            config.local_blocks - (1 + choice) * config.global_blocks
        )  # offset of a span's first global block

        def is_global(block: Index) -> Layout:
            offset, full_spans_end = (
                block % config.local_blocks - start,
                grid.blocks - grid.blocks % config.local_blocks,
            )
            in_span: Layout = (
                (block < full_spans_end) & (offset >= 0) & (offset < config.global_blocks)
            )
            if grid.causal or full_spans_end == grid.blocks:
                # Only later blocks could use the global ones of an unfinished span, so a causal layout has none.
                return in_span
            # The last span is short: its global blocks are moved towards its start until they fit.
            last_start = np.minimum(full_spans_end + start, grid.blocks - config.global_blocks)
            last: Layout = (last_start <= block) & (block < last_start + config.global_blocks)
            return in_span | last

        local: Layout = (grid.row // config.local_blocks == grid.column // config.local_blocks)[
            None
        ]
        far = is_global(grid.column)
        if config.horizontal_global:
            far = far | is_global(grid.row)
        if config.heads == "merged":
            return local | far
        split: Layout = np.where(head % 2 == 0, local, far)
        return split


@PATTERNS.register(
    "strided",
    traits=PatternTraits(
        causal=True,
        bidirectional=True,
        per_head_layout=True,
        density="min(1, ((2 * stride - 1) * (1 - 1 / stride) / N + 1 / stride) if heads == 'merged' "
        "else ((2 * stride + 1) / N + 1 / stride) / 2)",
    ),
)
class Strided(Pattern):
    """Child et al. 2019 (Sparse Transformer), strided: the block and the `stride` before it, and every `stride`-th."""

    class Config(Pattern.Config):
        stride: PositiveInt = 4
        """l, distance in blocks between seen blocks, and blocks of the local band on each side of the query's."""
        heads: Literal["merged", "split"] = "merged"
        """merged: each head sees band and strides; split: even heads see the band, odd heads the strides."""

    @property
    def differs_by_head(self) -> bool:
        return bool(self.config.heads == "split")

    def make_layout(self, grid: Grid) -> Layout:
        apart = (grid.row - grid.column)[None]
        band = abs(apart) <= self.config.stride
        strides = apart % self.config.stride == 0
        if not self.differs_by_head:
            merged: Layout = band | strides
            return merged
        split: Layout = np.where(grid.head % 2 == 0, band, strides)
        return split
