"""Conformance of attention patterns: no block of the future, a density that can be counted, the same each time."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from xscale.conformance.alternatives import neighbours
from xscale.conformance.check import check, is_near
from xscale.conformance.small_parts import dims, example, fitting
from xscale.core.config import Config
from xscale.core.registry import Entry
from xscale.nn.pattern.grid import Grid
from xscale.nn.pattern.pattern import PATTERNS, Layout, Pattern

BLOCKS = 48
HEADS = 4
BLOCK = 64


def built(entry: Entry[Any], causal: bool) -> Pattern:
    part: Pattern = entry.part(fitting(entry, dims(causal=causal, length=BLOCKS * BLOCK)))
    return part


def layout(part: Pattern, **changes: Any) -> Layout:
    usual = {"blocks": BLOCKS, "heads": HEADS, "causal": True, "block": BLOCK}
    return part.layout(Grid(**{**usual, **changes}))


@check("pattern", lambda entry: entry.traits.causal, at_start=True)
def the_future_is_out_of_sight(entry: Entry[Any]) -> None:
    part = built(entry, True)
    for blocks in (1, 2, 7, BLOCKS):
        seen = layout(part, blocks=blocks)
        assert seen.shape in [(1, blocks, blocks), (HEADS, blocks, blocks)]
        assert seen.dtype == np.bool_
        assert not np.triu(seen, 1).any(), "a block sees a later one"
        assert seen[:, np.arange(blocks), np.arange(blocks)].all(), "a block does not see itself"


@check("pattern", lambda entry: entry.traits.causal)
def a_longer_sequence_changes_nothing_for_the_shorter(entry: Entry[Any]) -> None:
    part = built(entry, True)
    full = layout(part)
    for blocks in (1, 5, 30):
        assert (layout(part, blocks=blocks) == full[:, :blocks, :blocks]).all()
    assert (layout(part, first_row=20) == full[:, 20:]).all()
    assert (layout(part, blocks=21, first_row=20, row_count=1) == full[:, 20:21, :21]).all()


@check("pattern", lambda entry: entry.traits.bidirectional)
def it_counts_blocks_only_where_declared(entry: Entry[Any]) -> None:
    part = built(entry, False)
    full = layout(part, causal=False)
    same = all(
        (layout(part, causal=False, blocks=blocks) == full[:, :blocks, :blocks]).all()
        for blocks in range(1, 20)
    )
    assert same != entry.traits.counts_blocks
    assert part.counts_blocks == entry.traits.counts_blocks


def by_token(part: Pattern, **changes: Any) -> Layout:
    """Which token sees which, order aside: [H or 1, T, T]."""
    grid = Grid(**{"blocks": BLOCKS, "heads": HEADS, "causal": True, "block": BLOCK, **changes})
    positions = np.arange(grid.blocks * BLOCK)
    outcome = np.zeros((1, len(positions), len(positions)), dtype=np.bool_)
    for blocks, rule in part.masked_layouts(grid):
        seen = blocks.repeat(BLOCK, 1).repeat(BLOCK, 2)
        outcome = outcome | (
            seen if rule is None else seen & rule(positions[:, None], positions[None, :])
        )
    assert not (outcome & ~part.layout(grid).repeat(BLOCK, 1).repeat(BLOCK, 2)).any(), (
        "a token mask shows keys outside the layout"
    )
    return outcome


@check("pattern")
def every_token_sees_itself_or_another(entry: Entry[Any]) -> None:
    causal = entry.traits.causal
    seen = by_token(built(entry, causal), blocks=9, causal=causal)
    assert (np.tril(seen) if causal else seen).any(-1).all()


@check("pattern", lambda entry: entry.traits.bidirectional)
def it_looks_both_ways(entry: Entry[Any]) -> None:
    seen = by_token(built(entry, False), blocks=9, causal=False)
    assert np.triu(seen, 1).any()
    assert np.tril(seen, -1).any()


@check("pattern")
def it_is_causal_or_bidirectional(entry: Entry[Any]) -> None:
    assert entry.traits.causal or entry.traits.bidirectional, "nothing could use it"


@check("pattern")
def its_density_is_what_it_says(entry: Entry[Any]) -> None:
    causal = not entry.traits.bidirectional
    for blocks in (96, 192):
        part = built(entry, causal)
        seen = layout(part, blocks=blocks, causal=causal)
        # Far from the edges, where no window is cut off.
        rows = seen[:, blocks // 4 : -blocks // 4]
        counted = rows.mean()
        names = {
            "N": blocks,
            "block": BLOCK,
            "min": min,
            "max": max,
            "len": len,
            **dict(part.config),
        }
        declared = eval(entry.traits.density, names)
        slack = 1.5 / blocks
        assert is_near(declared, counted, 0.15, slack), f"{blocks} blocks"


@check("pattern")
def heads_differ_only_where_declared(entry: Entry[Any]) -> None:
    causal = entry.traits.causal
    part = built(entry, causal)
    seen = layout(part, causal=causal)
    differs = len(seen) > 1 and any((seen[head] != seen[0]).any() for head in range(len(seen)))
    assert not differs or entry.traits.per_head_layout
    assert part.differs_by_head or len(seen) == 1
    for first in (0, 2):
        some = layout(part, causal=causal, heads=2, first_head=first)
        assert (some == (seen if len(seen) == 1 else seen[first : first + 2])).all(), (
            "heads are told by their index"
        )


@check("pattern", lambda entry: entry.traits.per_head_layout)
def heads_can_differ_where_declared(entry: Entry[Any]) -> None:
    """Patterns with the default config, one that differs from it in one choice, or one that is made of others that
    do."""
    config = fitting(entry, dims(causal=entry.traits.causal, length=BLOCKS * BLOCK))
    outcome = []
    for first in [config, *neighbours(config), *remade(config)]:
        if entry.part.check(first, dims(causal=entry.traits.causal, length=BLOCKS * BLOCK), ""):
            continue
        seen = layout(entry.part(first), causal=entry.traits.causal)
        outcome.append(len(seen) > 1 and bool((seen[0] != seen[1:]).any()))
    assert any(outcome)


def remade(config: Config) -> Iterator[Config]:
    """Configs of a pattern that is made of others, with other others."""
    for name in type(config).model_fields:
        inner = getattr(config, name)
        if isinstance(inner, tuple) and inner and isinstance(inner[0], Config):
            for other in PATTERNS:
                if other.traits.per_head_layout and type(config) is not other.part.Config:
                    yield config.model_copy(update={name: (example(other),)})


@check("pattern")
def it_is_drawn_only_where_declared(entry: Entry[Any]) -> None:
    causal = entry.traits.causal
    first = layout(built(entry, causal), causal=causal)
    np.random.seed(1)
    assert (layout(built(entry, causal), causal=causal) == first).all(), "not the same each time"
    config = built(entry, causal).config
    assert hasattr(config, "seed") == entry.traits.random
    if entry.traits.random:
        other = entry.part(config.model_copy(update={"seed": config.seed + 1}))
        assert (layout(other, causal=causal) != first).any(), "the seed changes nothing"
