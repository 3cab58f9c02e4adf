"""Conformance of optimizers: the states that they declare, shards updated alone where they say so, and resuming."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.checked import each_case
from xscale.conformance import optimizer as suite
from xscale.conformance.check import Arguments, Check
from xscale.core.registry import Entry, Family
from xscale.optim.optimizer.optimizer import LocalParameter, Optimizer, OptimizerTraits, zeros_like_values


@each_case(suite)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)


class Momentum(Optimizer):
    """Gradient descent with momentum."""

    def __init__(self, config: Any, weights: list[LocalParameter]) -> None:
        super().__init__(config, weights)
        self.mean = zeros_like_values(weights)

    def step(self, gradients: list[Tensor], lr: float) -> None:
        settings = zip(self.lr_factors, self.weight_decays, strict=True)
        tensors = zip(self.weights, self.mean, gradients, strict=True)
        for (weight, mean, gradient), (lr_factor, weight_decay) in zip(tensors, settings, strict=True):
            weight.value.mul_(1 - lr * lr_factor * weight_decay)
            mean.mul_(0.5).add_(self.scaled(gradient))
            weight.value.sub_(lr * lr_factor * mean)

    def scaled(self, gradient: Tensor) -> Tensor:
        return gradient

    def states(self) -> dict[str, list[Tensor]]:
        return {"mean": self.mean}


class Normed(Momentum):
    def scaled(self, gradient: Tensor) -> Tensor:
        scaled: Tensor = gradient / gradient.norm().clamp(min=1e-9)
        return scaled


class Forgetful(Momentum):
    """A count that it does not hand out."""

    calls = 0

    def scaled(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient * self.calls


class DecaysAll(Momentum):
    def step(self, gradients: list[Tensor], lr: float) -> None:
        super().step([one + 0.5 * weight.value for one, weight in zip(gradients, self.weights, strict=True)], lr)


class Ungrouped(Momentum):
    def __init__(self, config: Any, weights: list[LocalParameter]) -> None:
        super().__init__(config.model_copy(update={"groups": ()}), weights)


class Dice(Momentum):
    def scaled(self, gradient: Tensor) -> Tensor:
        return gradient + torch.randn_like(gradient)


def registered(part: type[Optimizer], *, states: int = 1, elementwise: bool = True) -> Entry[Any]:
    family: Family[OptimizerTraits] = Family("optimizer", OptimizerTraits)
    traits = OptimizerTraits(states_per_parameter=states, elementwise=elementwise)
    family.register("cheat", traits=traits)(type("Cheat", (part,), {}))
    return family.get("cheat")


def test_cheats_are_caught() -> None:
    for honest in (
        suite.it_keeps_as_much_as_it_says,
        suite.a_shard_can_be_stepped_alone_where_declared,
        suite.it_finds_a_minimum,
        suite.only_what_decays_is_decayed,
        suite.what_it_saved_goes_on_bitwise,
        suite.it_is_deterministic,
        suite.groups_set_the_rate_and_the_decay,
    ):
        honest(registered(Momentum))
    cheats: list[tuple[type[Optimizer], dict[str, Any], Any]] = [
        (Momentum, {"states": 2}, suite.it_keeps_as_much_as_it_says),
        (Momentum, {"elementwise": False}, suite.a_shard_can_be_stepped_alone_where_declared),
        (Normed, {}, suite.a_shard_can_be_stepped_alone_where_declared),
        (Forgetful, {}, suite.what_it_saved_goes_on_bitwise),
        (DecaysAll, {}, suite.only_what_decays_is_decayed),
        (Dice, {}, suite.it_is_deterministic),
        (Ungrouped, {}, suite.groups_set_the_rate_and_the_decay),
    ]
    for part, changes, check in cheats:
        with pytest.raises(AssertionError):
            check(registered(part, **changes))
