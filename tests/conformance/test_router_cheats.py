"""Routers that promise what they do not keep."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import test_router as suite
from xscale.core.registry import Entry, Family
from xscale.nn.ffn.moe.router.balance import load_balancing_loss
from xscale.nn.ffn.moe.router.router import Router, RouterDims, RouterTraits
from xscale.nn.ffn.moe.routing import Routing
from xscale.nn.tokens import Tokens

HONEST = RouterTraits(choice="token", top_k=1, drops=True, scope="token", causal=True, balance="loss")


class Plain(Router):
    """The best expert, with a loss that evens the load."""

    def __init__(self, config: Any, dims: RouterDims) -> None:
        super().__init__()
        self.declare("weight", (dims.experts, dims.width), ("state", "width"), dims.init)

    @classmethod
    def experts_per_token(cls, config: Any, experts: int) -> float:
        return 1.0

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.get_parameter("weight").t()

    def forward(self, x: Tensor, tokens: Tokens) -> Routing:
        probabilities = self.logits(x).softmax(1)
        weights, experts = probabilities.max(1, keepdim=True)
        loss = load_balancing_loss(probabilities, torch.arange(len(x)), experts[:, 0])
        return Routing.from_topk(experts, weights, probabilities, loss=loss)


class OverBatch(Plain):
    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x - x.mean(0))


class Noisy(Plain):
    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x + torch.randn_like(x))


class Deaf(Plain):
    """Its weights get no gradient."""

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x).detach()


class Doubles(Plain):
    def forward(self, x: Tensor, tokens: Tokens) -> Routing:
        found = super().forward(x, tokens)
        return replace(found, expert=found.expert[torch.arange(len(x)) // 2 * 2], token=found.token // 2 * 2)


class Lossless(Plain):
    def forward(self, x: Tensor, tokens: Tokens) -> Routing:
        return replace(super().forward(x, tokens), loss=(self.get_parameter("weight") * 0).sum())


def registered(part: type[Router], **changes: Any) -> Entry[Any]:
    family: Family[RouterTraits] = Family("router", RouterTraits)
    family.register("cheat", traits=replace(HONEST, **changes))(type("Cheat", (part,), {}))
    return family.get("cheat")


CHECKS = [
    suite.test_it_is_chosen_by_whom_it_says,
    suite.test_experts_overflow_where_declared,
    suite.test_it_looks_where_it_says,
    suite.test_the_future_leaks_where_declared,
    suite.test_the_load_is_evened_as_declared,
    suite.test_it_learns_where_declared,
    suite.test_random_numbers_only_where_declared,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_an_honest_router_passes(check: Any) -> None:
    check(registered(Plain))


@pytest.mark.parametrize(
    ("part", "changes", "check"),
    [
        (Plain, {"choice": "expert"}, suite.test_it_is_chosen_by_whom_it_says),
        (Plain, {"top_k": 2}, suite.test_it_is_chosen_by_whom_it_says),
        (Plain, {"drops": False}, suite.test_experts_overflow_where_declared),
        (Plain, {"scope": "batch"}, suite.test_it_looks_where_it_says),
        (OverBatch, {}, suite.test_it_looks_where_it_says),
        (OverBatch, {}, suite.test_the_future_leaks_where_declared),
        (Plain, {"causal": False}, suite.test_the_future_leaks_where_declared),
        (Lossless, {}, suite.test_the_load_is_evened_as_declared),
        (Plain, {"balance": "none"}, suite.test_the_load_is_evened_as_declared),
        (Plain, {"balance": "assignment"}, suite.test_the_load_is_evened_as_declared),
        (Deaf, {}, suite.test_it_learns_where_declared),
        (Plain, {"learned": False}, suite.test_it_learns_where_declared),
        (Noisy, {}, suite.test_random_numbers_only_where_declared),
        (Plain, {"random": True}, suite.test_random_numbers_only_where_declared),
    ],
)
def test_a_cheat_is_caught(part: type[Router], changes: dict[str, Any], check: Any) -> None:
    with pytest.raises(AssertionError):
        check(registered(part, **changes))


def test_a_routing_that_sends_a_token_twice_to_one_expert_is_caught() -> None:
    suite.test_a_routing_is_whole(registered(Plain), True)
    with pytest.raises(AssertionError):
        suite.test_a_routing_is_whole(registered(Doubles), True)
