"""Conformance of attention patterns: no block of the future, a density that can be counted, the same each time."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.conformance.made import dims, fitting
from tests.families import each, example
from tests.laws.test_5_config_is_data import neighbours
from xscale.core.config import Config
from xscale.core.registry import Entry, Family
from xscale.nn.pattern.grid import Grid, TokenMask
from xscale.nn.pattern.pattern import PATTERNS, Layout, MaskedLayout, Pattern, PatternTraits

BLOCKS, HEADS, BLOCK = 48, 4, 64


def built(entry: Entry[Any], causal: bool) -> Pattern:
    part: Pattern = entry.part(fitting(entry, dims(causal=causal, length=BLOCKS * BLOCK)))
    return part


def layout(part: Pattern, **changes: Any) -> Layout:
    usual = {"blocks": BLOCKS, "heads": HEADS, "causal": True, "block": BLOCK}
    return part.layout(Grid(**{**usual, **changes}))


@each(entry for entry in PATTERNS if entry.traits.causal)
def test_the_future_is_out_of_sight(entry: Entry[Any]) -> None:
    part = built(entry, True)
    for blocks in (1, 2, 7, BLOCKS):
        seen = layout(part, blocks=blocks)
        assert seen.shape in [(1, blocks, blocks), (HEADS, blocks, blocks)]
        assert seen.dtype == np.bool_
        assert not np.triu(seen, 1).any(), "a block sees a later one"
        assert seen[:, np.arange(blocks), np.arange(blocks)].all(), "a block does not see itself"


@each(entry for entry in PATTERNS if entry.traits.causal)
def test_a_longer_sequence_changes_nothing_for_the_shorter(entry: Entry[Any]) -> None:
    part = built(entry, True)
    whole = layout(part)
    for blocks in (1, 5, 30):
        assert (layout(part, blocks=blocks) == whole[:, :blocks, :blocks]).all()
    assert (layout(part, first_row=20) == whole[:, 20:]).all()
    assert (layout(part, blocks=21, first_row=20, row_count=1) == whole[:, 20:21, :21]).all()


@each(entry for entry in PATTERNS if entry.traits.bidirectional)
def test_it_counts_blocks_only_where_declared(entry: Entry[Any]) -> None:
    part = built(entry, False)
    whole = layout(part, causal=False)
    same = all(
        (layout(part, causal=False, blocks=blocks) == whole[:, :blocks, :blocks]).all() for blocks in range(1, 20)
    )
    assert same != entry.traits.counts_blocks
    assert part.counts_blocks == entry.traits.counts_blocks


def by_token(part: Pattern, **changes: Any) -> Layout:
    """Which token sees which, order aside: [H or 1, T, T]."""
    grid = Grid(**{"blocks": BLOCKS, "heads": HEADS, "causal": True, "block": BLOCK, **changes})
    place = np.arange(grid.blocks * BLOCK)
    found = np.zeros((1, len(place), len(place)), dtype=np.bool_)
    for blocks, rule in part.masked_layouts(grid):
        seen = blocks.repeat(BLOCK, 1).repeat(BLOCK, 2)
        found = found | (seen if rule is None else seen & rule(place[:, None], place[None, :]))
    assert not (found & ~part.layout(grid).repeat(BLOCK, 1).repeat(BLOCK, 2)).any(), (
        "a token mask shows keys outside the layout"
    )
    return found


@each(PATTERNS)
def test_every_token_sees_itself_or_another(entry: Entry[Any]) -> None:
    causal = entry.traits.causal
    seen = by_token(built(entry, causal), blocks=9, causal=causal)
    assert (np.tril(seen) if causal else seen).any(-1).all()


@each(entry for entry in PATTERNS if entry.traits.bidirectional)
def test_it_looks_both_ways(entry: Entry[Any]) -> None:
    seen = by_token(built(entry, False), blocks=9, causal=False)
    assert np.triu(seen, 1).any()
    assert np.tril(seen, -1).any()


@each(PATTERNS)
def test_it_is_causal_or_bidirectional(entry: Entry[Any]) -> None:
    assert entry.traits.causal or entry.traits.bidirectional, "nothing could use it"


@each(PATTERNS)
def test_its_density_is_what_it_says(entry: Entry[Any]) -> None:
    causal = not entry.traits.bidirectional
    for blocks in (96, 192):
        part = built(entry, causal)
        seen = layout(part, blocks=blocks, causal=causal)
        # Far from the edges, where no window is cut off.
        rows = seen[:, blocks // 4 : -blocks // 4]
        counted = rows.mean()
        names = {"N": blocks, "block": BLOCK, "min": min, "max": max, "len": len, **dict(part.config)}
        declared = eval(entry.traits.density, names)
        slack = 1.5 / blocks
        assert declared == pytest.approx(counted, rel=0.15, abs=slack), f"{blocks} blocks"


@each(PATTERNS)
def test_heads_differ_only_where_declared(entry: Entry[Any]) -> None:
    causal = entry.traits.causal
    part = built(entry, causal)
    seen = layout(part, causal=causal)
    differs = len(seen) > 1 and any((seen[head] != seen[0]).any() for head in range(len(seen)))
    assert not differs or entry.traits.per_head_layout
    assert part.differs_by_head or len(seen) == 1
    for first in (0, 2):
        some = layout(part, causal=causal, heads=2, first_head=first)
        assert (some == (seen if len(seen) == 1 else seen[first : first + 2])).all(), "heads are told by their index"


@each(entry for entry in PATTERNS if entry.traits.per_head_layout)
def test_heads_can_differ_where_declared(entry: Entry[Any]) -> None:
    """Patterns with the default config, one that differs from it in one choice, or one that is made of others that
    do."""
    config = fitting(entry, dims(causal=entry.traits.causal, length=BLOCKS * BLOCK))
    found = []
    for one in [config, *neighbours(config), *remade(config)]:
        if entry.part.check(one, dims(causal=entry.traits.causal, length=BLOCKS * BLOCK), ""):
            continue
        seen = layout(entry.part(one), causal=entry.traits.causal)
        found.append(len(seen) > 1 and bool((seen[0] != seen[1:]).any()))
    assert any(found)


def remade(config: Config) -> Iterator[Config]:
    """Configs of a pattern that is made of others, with other others."""
    for name in type(config).model_fields:
        inner = getattr(config, name)
        if isinstance(inner, tuple) and inner and isinstance(inner[0], Config):
            for other in PATTERNS:
                if other.traits.per_head_layout and type(config) is not other.part.Config:
                    yield config.model_copy(update={name: (example(other),)})


@each(PATTERNS)
def test_it_is_drawn_only_where_declared(entry: Entry[Any]) -> None:
    causal = entry.traits.causal
    first = layout(built(entry, causal), causal=causal)
    np.random.seed(1)
    assert (layout(built(entry, causal), causal=causal) == first).all(), "not the same each time"
    config = built(entry, causal).config
    assert hasattr(config, "seed") == entry.traits.random
    if entry.traits.random:
        other = entry.part(config.model_copy(update={"seed": config.seed + 1}))
        assert (layout(other, causal=causal) != first).any(), "the seed changes nothing"


class Window(Pattern):
    """A block and its neighbours."""

    def make_layout(self, grid: Grid) -> Layout:
        seen: Layout = (abs(grid.row - grid.column) <= 1)[None]
        return seen


class Sees(Window):
    def layout(self, grid: Grid) -> Layout:
        return self.make_layout(grid)


class FromTheEnd(Window):
    def make_layout(self, grid: Grid) -> Layout:
        drawn: Layout = super().make_layout(grid) | (grid.column == grid.blocks // 2)[None]
        return drawn


class Restless(Window):
    def make_layout(self, grid: Grid) -> Layout:
        drawn: Layout = super().make_layout(grid) | (np.random.default_rng().random((1, grid.rows, grid.blocks)) < 0.2)
        return drawn


class ByHead(Window):
    """Heads differ by how many there are, not by their index."""

    @property
    def differs_by_head(self) -> bool:
        return True

    def make_layout(self, grid: Grid) -> Layout:
        drawn: Layout = super().make_layout(grid) | (grid.column % (grid.heads + 1) == grid.head)
        return drawn


class Backwards(Window):
    def token_mask(self, grid: Grid) -> TokenMask | None:
        return lambda i, j: j <= i


class Farther(Window):
    """Shows tokens in blocks that its layout leaves out."""

    def masked_layouts(self, grid: Grid) -> tuple[MaskedLayout, ...]:
        return ((self.layout(grid) | True, None),)


class MasksTokens(Window):
    """Shows a token nothing."""

    def token_mask(self, grid: Grid) -> TokenMask | None:
        return lambda i, j: (i != 5) & (j == j)


def registered(part: type[Pattern], **changes: Any) -> Entry[Any]:
    honest: dict[str, Any] = {"causal": True, "bidirectional": True, "per_head_layout": False, "density": "3 / N"}
    family: Family[PatternTraits] = Family("pattern", PatternTraits)
    family.register("cheat", traits=PatternTraits(**{**honest, **changes}))(type("Cheat", (part,), {}))
    return family.get("cheat")


def test_cheats_are_caught() -> None:
    for honest in (
        test_the_future_is_out_of_sight,
        test_a_longer_sequence_changes_nothing_for_the_shorter,
        test_every_token_sees_itself_or_another,
        test_it_looks_both_ways,
        test_its_density_is_what_it_says,
        test_heads_differ_only_where_declared,
        test_it_is_drawn_only_where_declared,
    ):
        honest(registered(Window))
    cheats: list[tuple[type[Pattern], dict[str, Any], Any]] = [
        (Sees, {}, test_the_future_is_out_of_sight),
        (FromTheEnd, {}, test_a_longer_sequence_changes_nothing_for_the_shorter),
        (Farther, {}, test_every_token_sees_itself_or_another),
        (MasksTokens, {}, test_every_token_sees_itself_or_another),
        (Backwards, {}, test_it_looks_both_ways),
        (Window, {"density": "9 / N"}, test_its_density_is_what_it_says),
        (ByHead, {"per_head_layout": True}, test_heads_differ_only_where_declared),
        (Window, {"per_head_layout": True}, test_heads_can_differ_where_declared),
        (Restless, {}, test_it_is_drawn_only_where_declared),
        (Window, {"random": True}, test_it_is_drawn_only_where_declared),
        (Window, {"causal": False, "bidirectional": False}, test_it_is_causal_or_bidirectional),
    ]
    for part, changes, check in cheats:
        with pytest.raises(AssertionError):
            check(registered(part, **changes))
