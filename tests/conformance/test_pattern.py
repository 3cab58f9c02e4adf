"""Conformance of attention patterns: no block of the future, a density that can be counted, the same each time."""

from typing import Any

import numpy as np
import pytest

from tests.conformance.checked import each_case
from xscale.conformance import pattern as suite
from xscale.conformance.check import Arguments, Check
from xscale.core.registry import Entry, Family
from xscale.nn.pattern.grid import Grid, TokenMask
from xscale.nn.pattern.pattern import Layout, MaskedLayout, Pattern, PatternTraits


@each_case(suite)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)


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
        suite.the_future_is_out_of_sight,
        suite.a_longer_sequence_changes_nothing_for_the_shorter,
        suite.every_token_sees_itself_or_another,
        suite.it_looks_both_ways,
        suite.its_density_is_what_it_says,
        suite.heads_differ_only_where_declared,
        suite.it_is_drawn_only_where_declared,
    ):
        honest(registered(Window))
    cheats: list[tuple[type[Pattern], dict[str, Any], Any]] = [
        (Sees, {}, suite.the_future_is_out_of_sight),
        (FromTheEnd, {}, suite.a_longer_sequence_changes_nothing_for_the_shorter),
        (Farther, {}, suite.every_token_sees_itself_or_another),
        (MasksTokens, {}, suite.every_token_sees_itself_or_another),
        (Backwards, {}, suite.it_looks_both_ways),
        (Window, {"density": "9 / N"}, suite.its_density_is_what_it_says),
        (ByHead, {"per_head_layout": True}, suite.heads_differ_only_where_declared),
        (Window, {"per_head_layout": True}, suite.heads_can_differ_where_declared),
        (Restless, {}, suite.it_is_drawn_only_where_declared),
        (Window, {"random": True}, suite.it_is_drawn_only_where_declared),
        (Window, {"causal": False, "bidirectional": False}, suite.it_is_causal_or_bidirectional),
    ]
    for part, changes, check in cheats:
        with pytest.raises(AssertionError):
            check(registered(part, **changes))
