"""Conformance of residual streams."""

from typing import Any

import pytest
from torch import Tensor

from tests.conformance.checked import each_case
from xscale.conformance.block import residual as suite
from xscale.conformance.check import Arguments, Check
from xscale.core.registry import Entry
from xscale.nn.residual.residual_stream import RESIDUALS, ResidualStream, ResidualTraits
from xscale.nn.residual.sublayer import Sublayer
from xscale.nn.tokens import Tokens


@each_case(suite)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)


class Two(ResidualStream):
    """Two tensors, of which sublayers read the first."""

    class Of(Sublayer):
        def read(self, stream: Any) -> Tensor:
            read: Tensor = stream[0]
            return read

        def write(self, y: Tensor, stream: Any, tokens: Tokens) -> Any:
            return stream[0] + y, stream[1] + y

    sublayer = Of
    form = "two"

    def begin(self, x: Tensor) -> Any:
        return x, x

    def end(self, stream: Any) -> Tensor:
        total: Tensor = stream[0] + stream[1]
        return total

    def sent(self, sublayers: int) -> int:
        return 2

    def to_tensors(self, stream: Any) -> tuple[Tensor, ...]:
        return tuple(stream)

    def from_tensors(self, tensors: tuple[Tensor, ...]) -> Any:
        return tensors


class SendsOne(Two):
    """Forgets the second tensor at the edge of a stage."""

    def from_tensors(self, tensors: tuple[Tensor, ...]) -> Any:
        return tensors[0], tensors[0] * 0


class Miscounts(Two):
    def sent(self, sublayers: int) -> int:
        return 1


class Averages(ResidualStream):
    """Reads the mean over all tokens."""

    class Of(Sublayer):
        def read(self, stream: Any) -> Tensor:
            read: Tensor = stream.mean(1, keepdim=True).expand_as(stream)
            return read

    sublayer = Of


class Detaches(ResidualStream):
    def begin(self, x: Tensor) -> Any:
        return x.detach()


def registered(monkeypatch: pytest.MonkeyPatch, part: type[ResidualStream], *, hidden_states: bool) -> Entry[Any]:
    monkeypatch.setattr(RESIDUALS, "_entries", dict(vars(RESIDUALS)["_entries"]))
    traits = ResidualTraits(hidden_states=hidden_states)
    RESIDUALS.register("cheat", traits=traits)(type("Cheat", (part,), {}))
    return RESIDUALS.get("cheat")


@pytest.mark.parametrize(
    ("part", "hidden_states", "check"),
    [
        (Two, True, suite.the_stream_is_the_hidden_states_where_declared),
        (ResidualStream, False, suite.the_stream_is_the_hidden_states_where_declared),
        (SendsOne, False, suite.a_pipeline_sends_the_stream_whole),
        (Miscounts, False, suite.a_pipeline_sends_the_stream_whole),
        (Averages, True, suite.each_token_by_itself),
        (Detaches, True, suite.gradients_reach_the_input_and_every_parameter),
    ],
)
def test_cheats_are_caught(
    monkeypatch: pytest.MonkeyPatch, part: type[ResidualStream], hidden_states: bool, check: Check
) -> None:
    with pytest.raises(AssertionError):
        check(registered(monkeypatch, part, hidden_states=hidden_states))


def test_an_honest_stream_of_two_tensors_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = registered(monkeypatch, Two, hidden_states=False)
    suite.the_output_are_hidden_states(honest)
    suite.the_stream_is_the_hidden_states_where_declared(honest)
    suite.each_token_by_itself(honest)
    suite.a_pipeline_sends_the_stream_whole(honest)
    suite.gradients_reach_the_input_and_every_parameter(honest)
