"""Conformance of objectives: a model it can train, nothing to copy from, and the same batch however it is cut."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.checked import each_case
from tests.conformance.made import VOCABULARY
from xscale.conformance import objective as suite
from xscale.conformance.check import Arguments, Check
from xscale.core.registry import Entry, Family
from xscale.nn.tokens import Tokens
from xscale.objective.objective import Batch, Objective, ObjectiveTraits


@each_case(suite)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)


class Next(Objective):
    """The next token."""

    def batch(self, tokens: Tensor, documents: Tensor | None, index: Tensor, **others: Any) -> Batch:
        return Batch(Tokens.from_ids(tokens[:, :-1], documents, **others), tokens[:, 1:])


class Copy(Next):
    def batch(self, tokens: Tensor, documents: Tensor | None, index: Tensor, **others: Any) -> Batch:
        return Batch(Tokens.from_ids(tokens[:, :-1], documents, **others), tokens[:, :-1])


class Dice(Next):
    def batch(self, tokens: Tensor, documents: Tensor | None, index: Tensor, **others: Any) -> Batch:
        kept = torch.rand(tokens.shape) < 0.5
        return super().batch(torch.where(kept, tokens, 4), documents, index, **others)


class OfTheBatch(Next):
    def batch(self, tokens: Tensor, documents: Tensor | None, index: Tensor, **others: Any) -> Batch:
        return super().batch((tokens + tokens[:1]) % VOCABULARY, documents, index, **others)


class Mean(Next):
    def loss(self, model: Any, batch: Batch) -> Tensor:
        return super().loss(model, batch) / batch.weight


def registered(part: type[Objective], **changes: Any) -> Entry[Any]:
    kept: Family[ObjectiveTraits] = Family("objective", ObjectiveTraits)
    traits = {"causal": True, "source": False, "random": False, **changes}
    kept.register("cheat", traits=ObjectiveTraits(**traits))(type("Cheat", (part,), {}))
    return kept.get("cheat")


def test_cheats_are_caught() -> None:
    for honest in (
        suite.a_model_with_the_needed_traits_learns,
        suite.ignored_tokens_weigh_nothing,
        suite.what_is_asked_for_stands_behind_only_where_declared,
        suite.draws_depend_on_the_sample_alone,
    ):
        honest(registered(Next))
    cheats: list[tuple[type[Objective], dict[str, Any], Any]] = [
        (Next, {"source": True}, suite.a_model_with_the_needed_traits_learns),
        (Mean, {}, suite.ignored_tokens_weigh_nothing),
        (Copy, {}, suite.what_is_asked_for_stands_behind_only_where_declared),
        (Next, {"causal": False}, suite.what_is_asked_for_stands_behind_only_where_declared),
        (Dice, {"random": True}, suite.draws_depend_on_the_sample_alone),
        (Next, {"random": True}, suite.draws_depend_on_the_sample_alone),
    ]
    for part, changes, check in cheats:
        with pytest.raises(AssertionError):
            check(registered(part, **changes))
    with pytest.raises(AssertionError):
        suite.micro_batches_make_the_batch(registered(OfTheBatch), False)
