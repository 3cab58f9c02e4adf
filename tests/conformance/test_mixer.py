"""Conformance of mixers; a mixer that holds a core is tried with every core that can do what is asked."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.checked import Marks, each_case
from tests.families import example
from xscale.conformance.attention import mixer as suite
from xscale.conformance.check import Arguments, Check
from xscale.core.registry import Entry, Family
from xscale.nn.attention.core import CORES
from xscale.nn.dims import Dims
from xscale.nn.mixer.mixer import MIXERS, Mixer, MixerTraits


def marks(check: Check, arguments: Arguments) -> Marks:
    """A mixer that hands queries, keys and values to a core as another does is tried quickly with one of each kind.

    The first mixer that holds a core is tried with all; the others with the first core of those with equal traits, and
    in the long suite with the rest.
    """
    if not isinstance(arguments[0], tuple) or "core" not in type(arguments[0][1]).model_fields:
        return []
    entry, config = arguments[0]
    first = next(mixer for mixer in MIXERS if "core" in type(example(mixer)).model_fields)
    alone = entry.name != first.name and CORES.of(config.core).name not in first_of_each_kind()
    return [pytest.mark.long] if alone else []


@cache
def first_of_each_kind() -> frozenset[str]:
    """The first core of those with equal traits."""
    return frozenset({declared(core): core.name for core in reversed(list(CORES))}.values())


def declared(core: Entry[Any]) -> tuple[bool, ...]:
    """Whether the core has each trait that is tried here."""
    return tuple(
        getattr(core.traits, trait, True) for trait in ("causal", "bidirectional", "cross", "documents", "decode")
    )


@each_case(suite, marks=marks)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)


class Mean(Mixer):
    """The mean of what a token may see."""

    def __init__(self, config: Any, dims: Dims) -> None:
        super().__init__()
        self.causal = dims.causal and not dims.cross

    def forward(self, x: Tensor, tokens: Any, memory: Tensor | None = None, source: Any = None) -> Tensor:
        if memory is not None:
            return x + memory.mean(1, keepdim=True)
        if not self.causal:
            return x.mean(1, keepdim=True).expand_as(x)
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class Sees(Mean):
    def forward(self, x: Tensor, tokens: Any, memory: Tensor | None = None, source: Any = None) -> Tensor:
        return super().forward(x, tokens, memory) + 1e-6 * x.roll(-1, 1)


class Blind(Mean):
    def forward(self, x: Tensor, tokens: Any, memory: Tensor | None = None, source: Any = None) -> Tensor:
        return super().forward(x, tokens, None if memory is None else memory[:, : x.shape[1]])


def registered(part: type[Mixer]) -> suite.Case:
    family: Family[MixerTraits] = Family("mixer", MixerTraits)
    traits = MixerTraits(causal=True, bidirectional=True, cross=True, documents=True, decode=True)
    family.register("cheat", traits=traits)(type("Cheat", (part,), {}))
    return family.get("cheat"), family.get("cheat").part.Config()


def test_cheats_are_caught() -> None:
    honest = registered(Mean)
    suite.the_future_does_not_leak(honest)
    suite.it_looks_both_ways(honest)
    suite.another_sequence_is_read(honest)
    for part, check in [
        (Sees, suite.the_future_does_not_leak),
        (Blind, suite.another_sequence_is_read),
        (Mean, suite.packed_documents_stay_apart),
    ]:
        with pytest.raises(AssertionError):
            check(registered(part))
    with pytest.raises(AssertionError):
        suite.incremental_is_parallel(registered(Mean), [5, 1, 1])
