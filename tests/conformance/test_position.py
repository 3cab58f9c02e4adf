"""Conformance of position parts: each acts where it says, and relative ones see differences only."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.checked import each_case
from xscale.conformance import position as suite
from xscale.conformance.check import Arguments, Check
from xscale.core.registry import Entry, Family
from xscale.nn.position.position import Position, PositionTraits
from xscale.nn.tokens import Tokens


@each_case(suite)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)


class Ramp(Position):
    """Adds the position to the input."""

    def __init__(self, config: Any, dims: Any, heads: int = 0, head_width: int = 0) -> None:
        super().__init__()

    def embed(self, x: Tensor, tokens: Tokens) -> Tensor:
        return x + tokens.positions[..., None]


class Ignores(Ramp):
    """Counts tokens, whatever positions they were given."""

    def embed(self, x: Tensor, tokens: Tokens) -> Tensor:
        return x + torch.arange(x.shape[1])[:, None]


def registered(part: type[Position], **changes: Any) -> Entry[Any]:
    honest = PositionTraits(where="input", relative=False, extrapolates=True, cost="T*D")
    family: Family[PositionTraits] = Family("position", PositionTraits)
    family.register("cheat", traits=replace(honest, **changes))(type("Cheat", (part,), {}))
    return family.get("cheat")


def test_cheats_are_caught() -> None:
    for honest in (
        suite.it_acts_where_it_says,
        suite.relative_sees_differences_only,
        suite.the_order_is_known,
        suite.explicit_positions_are_the_default_ones,
        suite.it_goes_on_where_declared,
    ):
        honest(registered(Ramp))
    cheats: list[tuple[type[Position], dict[str, Any], Any]] = [
        (Ramp, {"where": "qk"}, suite.it_acts_where_it_says),
        (Ramp, {"relative": True}, suite.relative_sees_differences_only),
        (Ignores, {}, suite.the_order_is_known),
        (Ignores, {}, suite.explicit_positions_are_the_default_ones),
        (Ramp, {"extrapolates": False}, suite.it_goes_on_where_declared),
        (Ramp, {"cost": "T**3"}, suite.its_cost_is_a_formula),
    ]
    for part, changes, check in cheats:
        with pytest.raises(AssertionError):
            check(registered(part, **changes))
