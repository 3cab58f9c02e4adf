"""Conformance of models: order kept, sources read, text written one token at a time as all at once."""

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from tests.conformance.checked import each_case
from xscale.conformance import model as suite
from xscale.conformance.check import Arguments, Check
from xscale.core.registry import Entry, Family
from xscale.nn.model.model import Model, ModelTraits
from xscale.nn.tokens import Tokens


@each_case(suite)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)


class Bag(Model):
    """Scores from an embedding alone: causal, since it sees nothing else."""

    def __init__(self, config: Any, vocabulary: int, length: int) -> None:
        super().__init__()
        from xscale.nn.init import Init
        from xscale.nn.linear import Embedding

        self.table = Embedding(vocabulary, config.width, Init())

    def mixed(self, x: Tensor) -> Tensor:
        return x

    def forward(self, tokens: Tokens, targets: Tensor | None = None, source: Tokens | None = None) -> Tensor:
        logits = self.mixed(self.table(tokens.ids)) @ self.table.weight.t()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class Sees(Bag):
    def mixed(self, x: Tensor) -> Tensor:
        return x + 1e-6 * x.roll(-1, 1)


class Remembers(Bag):
    """Depends on what stands before, across documents, and keeps no cache."""

    def mixed(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


def registered(part: type[Model], **changes: Any) -> Entry[Any]:
    family: Family[ModelTraits] = Family("model", ModelTraits)
    traits = {"causal": True, "source": False, "decode": True, **changes}
    family.register("cheat", traits=ModelTraits(**traits))(type("Cheat", (part,), {}))
    return family.get("cheat")


def test_cheats_are_caught() -> None:
    for honest in (
        suite.logits_and_losses_agree,
        suite.the_future_is_seen_only_where_declared,
        suite.a_source_is_read_where_declared,
        suite.packed_documents_stay_apart,
        suite.every_weight_takes_part,
    ):
        honest(registered(Bag))
    cheats: list[tuple[type[Model], dict[str, Any], Any]] = [
        (Sees, {}, suite.the_future_is_seen_only_where_declared),
        (Bag, {"causal": False}, suite.the_future_is_seen_only_where_declared),
        (Bag, {"source": True}, suite.a_source_is_read_where_declared),
        (Remembers, {}, suite.packed_documents_stay_apart),
    ]
    for part, changes, check in cheats:
        with pytest.raises(AssertionError):
            check(registered(part, **changes))
    with pytest.raises(AssertionError):
        suite.written_token_by_token_it_says_the_same(registered(Remembers), [1] * suite.LENGTH)
