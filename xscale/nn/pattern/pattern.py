"""Base class and registry of patterns: which key blocks a query block sees."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt

from xscale.core import config as schema
from xscale.core.config import NonNegativeInt, Slot
from xscale.core.errors import Problem
from xscale.core.registry import Family
from xscale.core.requirements import kinds, must_be_odd
from xscale.nn.pattern.grid import Grid, TokenMask

BlockIndex = NonNegativeInt
"""Index of a block, counted from the start of the sequence."""
TokenIndex = NonNegativeInt
"""Index of a token, counted from the start of the sequence."""
Layout = npt.NDArray[np.bool_]
MaskedLayout = tuple[Layout, TokenMask | None]


@dataclass(frozen=True)
class PatternTraits:
    """Properties that a pattern declares; the conformance suite tests each."""

    causal: bool
    """Has a causal layout: no block sees a later one, every block sees itself, and the layout of earlier blocks stays
    the same when the sequence grows, so that decoding sees what training saw."""
    bidirectional: bool
    """Has a bidirectional layout."""
    per_head_layout: bool
    """With some config, heads have different layouts."""
    density: str
    """Fraction of block pairs that are seen far from the edges, in the bidirectional layout (causal, if it is the only
    one): a Python expression in N (blocks of the sequence), block (tokens of one) and the config's keys."""
    counts_blocks: bool = False
    """In the bidirectional layout the number of blocks decides what the first ones see of each other."""
    random: bool = False
    """The layout is drawn by a seed in the config: the same in every process and run."""


class Pattern:
    """Base class of patterns, built as `Pattern(config)`. A pattern has no tensors and no parameters."""

    class Config(schema.Config):
        pass

    odd_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of the config that count blocks or tokens around the query's own, which is in the middle."""
    causal_alternative: ClassVar[str] = ""
    """Part to take in a causal model instead of this pattern, if it is not another pattern."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def check(cls, config: Any, dims: Any, path: str) -> list[Problem]:
        """Return every problem of `config` within a model of `dims`; `path` is the config's dotted path."""
        counts = {f"{path}.{key}": getattr(config, key) for key in cls.odd_keys}
        return [problem for key, count in counts.items() for problem in must_be_odd(key, count)]

    @property
    def counts_blocks(self) -> bool:
        """Trait `counts_blocks` of this pattern, which follows from its members if it is made of patterns."""
        return PATTERNS.get(str(self.Config.kind)).traits.counts_blocks

    def make_layout(self, grid: Grid) -> Layout:
        """Bool [H or 1, rows, N], true where the query block sees the key block; `layout` then removes the future."""
        raise NotImplementedError

    def layout(self, grid: Grid) -> Layout:
        """The layout [H or 1, rows, N], causal if the grid is: a pure function of config and grid."""
        return self._causal(self.make_layout(grid), grid)

    def token_mask(self, grid: Grid) -> TokenMask | None:
        """Token mask inside the blocks of the layout; None: every token of a seen block is seen."""
        return None

    def masked_layouts(self, grid: Grid) -> tuple[MaskedLayout, ...]:
        """Layouts with their token masks: a key is seen where any of them shows it. Their union is `layout`."""
        return ((self.layout(grid), self.token_mask(grid)),)

    def _causal(self, layout: Layout, grid: Grid) -> Layout:
        seen: Layout = np.broadcast_to(
            layout, (grid.heads if self.differs_by_head else 1, grid.rows, grid.blocks)
        )
        if not grid.causal:
            return seen
        causal: Layout = (seen & (grid.column <= grid.row)) | (grid.column == grid.row)
        return causal

    @property
    def differs_by_head(self) -> bool:
        """Whether heads have different layouts under this config."""
        return False


PATTERNS = Family("pattern", PatternTraits, Pattern)
PatternSlot = Annotated[Pattern.Config, Slot(PATTERNS)]
"""A config key that holds any pattern."""


def check_pattern(config: schema.Config, dims: Any, path: str) -> list[Problem]:
    """Return every problem of the pattern `config` at `path`, also if it has no layout for a model of `dims`."""
    entry = PATTERNS.of(config)
    problems = list(entry.part.check(config, dims, path))
    wanted = "causal" if dims is None or (dims.causal and not dims.cross) else "bidirectional"
    if dims is not None and not getattr(entry.traits, wanted):
        able = PATTERNS.able(**{wanted: True})
        alternative = entry.part.causal_alternative if wanted == "causal" else ""
        fix = f"Or take {alternative}." if alternative else ""
        what = f"pattern '{entry.name}' has no {wanted} layout, and this model is {wanted}"
        problems.append(Problem(path, what, fix, choices=kinds(able, path)))
    return problems


def pattern_layout(
    config: schema.Config, length: int, heads: int, causal: bool, layer: int = 0, block: int = 64
) -> Layout:
    """Return the layout [H or 1, N, N] over `length` tokens in blocks of `block` tokens, as the report draws it."""
    pattern: Pattern = PATTERNS.build(config)
    return pattern.layout(
        Grid(blocks=-(-length // block), heads=heads, causal=causal, layer=layer, block=block)
    )


def pattern_density(
    config: schema.Config,
    length: int,
    causal: bool,
    heads: int = 1,
    layer: int = 0,
    block: int = 64,
) -> float:
    """Return the fraction of block pairs that are seen, out of all pairs (causal: those not in the future)."""
    layout = pattern_layout(config, length, heads, causal, layer, block)
    blocks = layout.shape[-1]
    allowed = blocks * (blocks + 1) / 2 if causal else float(blocks * blocks)
    density: float = float(layout.mean()) * blocks * blocks / allowed
    return density
