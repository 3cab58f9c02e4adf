"""Conformance of feed-forward parts."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conformance.checked import each_case
from xscale.conformance.block import ffn as suite
from xscale.conformance.check import Arguments, Check
from xscale.core.registry import Entry, Family
from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import Ffn, FfnTraits
from xscale.nn.linear import Linear


@each_case(suite)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)


class Whole(Ffn):
    """A linear map."""

    def __init__(self, config: Any, dims: Dims) -> None:
        super().__init__()
        self.map = Linear(dims.width, dims.width, ("ffn", "width"), dims.init)

    def forward(self, x: Tensor, tokens: Any) -> Tensor:
        out: Tensor = self.map(x)
        return out


class Averages(Whole):
    def forward(self, x: Tensor, tokens: Any) -> Tensor:
        return x + super().forward(x.mean(1, keepdim=True), tokens)


class Quarter(Whole):
    """Each token uses one quarter of the rows or another."""

    def forward(self, x: Tensor, tokens: Any) -> Tensor:
        return super().forward(x, tokens) * (torch.arange(x.shape[-1]) % 4 == (x[..., :1] > 0))


def registered(part: type[Ffn], **traits: bool) -> Entry[Any]:
    family: Family[FfnTraits] = Family("ffn", FfnTraits)
    family.register("cheat", traits=FfnTraits(**{"per_token": True, "sparse": False, **traits}))(
        type("Cheat", (part,), {})
    )
    return family.get("cheat")


def test_cheats_are_caught() -> None:
    suite.each_token_by_itself_where_declared(registered(Whole))
    suite.a_token_uses_a_part_of_the_weights_where_declared(registered(Whole))
    suite.a_token_uses_a_part_of_the_weights_where_declared(registered(Quarter, sparse=True))
    suite.a_causal_model_sees_no_future_through_it(registered(Whole))
    for part, traits, check in [
        (Averages, {"per_token": True}, suite.a_causal_model_sees_no_future_through_it),
        (Whole, {"sparse": True}, suite.a_token_uses_a_part_of_the_weights_where_declared),
        (Quarter, {"sparse": False}, suite.a_token_uses_a_part_of_the_weights_where_declared),
    ]:
        with pytest.raises(AssertionError):
            check(registered(part, **traits))


def test_a_part_whose_tokens_depend_on_their_order_is_caught() -> None:
    class Counts(Whole):
        def forward(self, x: Tensor, tokens: Any) -> Tensor:
            return super().forward(x, tokens).cumsum(1)

    with pytest.raises(AssertionError):
        suite.each_token_by_itself_where_declared(registered(Counts))


def test_cheats_of_the_neighbours_are_caught() -> None:
    class Shifts(Whole):
        def forward(self, x: Tensor, tokens: Any) -> Tensor:
            return super().forward(x + F.pad(x, (0, 0, 1, 0))[:, :-1], tokens)

    for part in (Whole, Averages, Shifts):
        with pytest.raises(AssertionError):
            suite.a_token_reads_its_neighbours_in_its_document(registered(part, per_token=False, reads_neighbours=True))
