"""Conformance of optimizers: the states that they declare, shards updated alone where they say so, and resuming."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from xscale.conformance.check import check
from xscale.conformance.small_parts import drawn, example
from xscale.core.registry import Entry
from xscale.optim.groups import ParameterGroup
from xscale.optim.optimizer.optimizer import LocalParameter, Optimizer

SHAPES = {"matrix": (12, 8), "gain": (8,), "experts": (4, 6, 8)}


def weights(seed: int = 0) -> list[LocalParameter]:
    """Parameters as materialising gives them: float64, matrices decay."""
    return [
        LocalParameter(
            name, drawn(*shape, seed=seed + at), decays=len(shape) > 1, linear_map=len(shape) > 1
        )
        for at, (name, shape) in enumerate(SHAPES.items())
    ]


def gradients(step: int) -> list[Tensor]:
    return [drawn(*shape, seed=100 * step + at) for at, shape in enumerate(SHAPES.values())]


def built(entry: Entry[Any], over: list[LocalParameter], **changes: Any) -> Optimizer:
    part: Optimizer = entry.part(example(entry).model_copy(update=changes), over)
    return part


def stepped(
    entry: Entry[Any], steps: int = 5, **changes: Any
) -> tuple[list[LocalParameter], Optimizer]:
    over = weights()
    optimizer = built(entry, over, **changes)
    for step in range(steps):
        optimizer.step(gradients(step), 1e-2)
    return over, optimizer


@check("optimizer", at_start=True)
def it_keeps_as_much_as_it_says(entry: Entry[Any]) -> None:
    over, optimizer = stepped(entry, 1)
    states = optimizer.states()
    reduced = optimizer.reduced_dims()
    for at, weight in enumerate(over):
        held = [tensors[at] for name, tensors in states.items() if name not in reduced]
        kept = sum(tensor.numel() for tensor in held if tensor is not None)
        if weight.linear_map or entry.traits.elementwise:
            assert kept == entry.traits.states_per_parameter * weight.value.numel()
        for name, tensors in states.items():
            tensor, shape = tensors[at], list(weight.value.shape)
            if tensor is not None:
                if name in reduced:
                    shape.pop(reduced[name])
                assert list(tensor.shape) == shape, name


@check("optimizer")
def a_shard_can_be_stepped_alone_where_declared(entry: Entry[Any]) -> None:
    full, _ = stepped(entry)
    halves = []
    for half in range(2):
        over = [replace(weight, value=weight.value.chunk(2)[half].clone()) for weight in weights()]
        optimizer = built(entry, over)
        for step in range(5):
            optimizer.step([gradient.chunk(2)[half].clone() for gradient in gradients(step)], 1e-2)
        halves.append(over)
    same = all(
        torch.allclose(weight.value, torch.cat((first.value, second.value)), rtol=1e-12, atol=1e-12)
        for weight, first, second in zip(full, *halves, strict=True)
    )
    assert same == entry.traits.elementwise


@check("optimizer")
def it_finds_a_minimum(entry: Entry[Any]) -> None:
    over = weights()
    optimizer = built(entry, over, weight_decay=0.0)
    for step in range(400):
        optimizer.step([weight.value - 1 for weight in over], 0.05 * (1 - step / 400))
    for weight, before in zip(over, weights(), strict=True):
        assert (weight.value - 1).square().sum() < 0.05 * (before.value - 1).square().sum()


@check("optimizer")
def only_what_decays_is_decayed(entry: Entry[Any]) -> None:
    over = weights()
    built(entry, over, weight_decay=0.5).step(
        [torch.zeros_like(weight.value) for weight in over], 1e-2
    )
    for weight, before in zip(over, weights(), strict=True):
        wanted = before.value * (1 - 0.5e-2) if weight.decays else before.value
        assert torch.allclose(weight.value, wanted, rtol=1e-9, atol=1e-12)


@check("optimizer", at_start=True)
def a_rate_of_zero_moves_nothing(entry: Entry[Any]) -> None:
    over = weights()
    built(entry, over).step(gradients(0), 0.0)
    assert all(
        torch.equal(weight.value, other.value)
        for weight, other in zip(over, weights(), strict=True)
    )


@check("optimizer")
def what_it_saved_goes_on_bitwise(entry: Entry[Any]) -> None:
    straight, _ = stepped(entry, 8)
    over, first = stepped(entry, 5)
    kept = {
        name: [None if tensor is None else tensor.clone() for tensor in tensors]
        for name, tensors in first.states().items()
    }
    counters = first.counters()
    again = [replace(weight, value=weight.value.clone()) for weight in over]
    second = built(entry, again)
    assert second.states().keys() == kept.keys(), (
        "a fresh optimizer has no place for the saved states"
    )
    for name, tensors in second.states().items():
        for tensor, saved in zip(tensors, kept[name], strict=True):
            if tensor is not None:
                assert saved is not None
                tensor.copy_(saved)
    second.set_counters(counters)
    for step in range(5, 8):
        second.step(gradients(step), 1e-2)
    assert all(
        torch.equal(weight.value, other.value)
        for weight, other in zip(straight, again, strict=True)
    )


@check("optimizer")
def a_scaled_step_is_a_step_on_scaled_gradients(entry: Entry[Any]) -> None:
    scaled, plain = weights(), weights()
    first, second = built(entry, scaled), built(entry, plain)
    for step in range(3):
        first.scaled_step(gradients(step), 1e-2, 0.3)
        second.step([gradient * 0.3 for gradient in gradients(step)], 1e-2)
    for weight, expected in zip(scaled, plain, strict=True):
        assert torch.allclose(weight.value, expected.value, rtol=1e-12, atol=1e-12)


@check("optimizer")
def it_is_deterministic(entry: Entry[Any]) -> None:
    torch.manual_seed(7)
    first, _ = stepped(entry)
    torch.manual_seed(8)
    other, _ = stepped(entry)
    assert all(torch.equal(a.value, b.value) for a, b in zip(first, other, strict=True))


@check("optimizer")
def groups_set_the_rate_and_the_decay(entry: Entry[Any]) -> None:
    """A group's factor is that of the learning rate, its decay that of all its weights; the first match wins."""
    groups = (
        ParameterGroup(match="matr*", lr_factor=0.25),
        ParameterGroup(match="gain", weight_decay=0.7),
        ParameterGroup(match="*", lr_factor=0.0),
    )
    over = weights()
    optimizer = built(entry, over, groups=groups, weight_decay=0.3)
    slower, decayed = weights(), [replace(weight, decays=True) for weight in weights()]
    second, third = built(entry, slower, weight_decay=0.3), built(entry, decayed, weight_decay=0.7)
    for step in range(3):
        optimizer.step(gradients(step), 1e-2)
        second.step(gradients(step), 0.25e-2)
        third.step(gradients(step), 1e-2)
    assert torch.allclose(over[0].value, slower[0].value, rtol=1e-12, atol=1e-12)
    assert torch.allclose(over[1].value, decayed[1].value, rtol=1e-12, atol=1e-12)
    assert torch.equal(over[2].value, weights()[2].value)
