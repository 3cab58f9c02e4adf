"""Conformance of norms."""

from typing import Any

import pytest
from torch import Tensor

from tests.conformance.checked import each_case
from xscale.conformance.block import norm as suite
from xscale.conformance.check import Arguments, Check
from xscale.core.registry import Entry, Family
from xscale.nn.norm.norm import Norm, NormTraits
from xscale.nn.tokens import Tokens


@each_case(suite)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)


class Plain(Norm):
    """Nothing at all: per token, not centred."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        return x


class OverTokens(Plain):
    """Normalises over the sequence."""

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        return x - x.mean(1, keepdim=True)


def registered(part: type[Norm], *, per_token: bool, centred: bool) -> Entry[Any]:
    family: Family[NormTraits] = Family("norm", NormTraits)
    family.register("cheat", traits=NormTraits(per_token=per_token, centred=centred))(type("Cheat", (part,), {}))
    return family.get("cheat")


def test_cheats_are_caught() -> None:
    honest = registered(Plain, per_token=True, centred=False)
    suite.each_token_by_itself_where_declared(honest)
    suite.it_centres_where_declared(honest)
    with pytest.raises(AssertionError):
        suite.it_centres_where_declared(registered(Plain, per_token=True, centred=True))
    with pytest.raises(AssertionError):
        suite.each_token_by_itself_where_declared(registered(OverTokens, per_token=True, centred=False))
    suite.each_token_by_itself_where_declared(registered(OverTokens, per_token=False, centred=False))
