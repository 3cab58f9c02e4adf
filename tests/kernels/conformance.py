"""Conformance checks of every implementation of every operator, on the examples that its folder draws."""

import importlib
import random
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from xscale_kernels.cases import Example, Pick, as_tuple
from xscale_kernels.select import UnusableError, implementations, operators

BOUNDS = {torch.float64: 1e-11, torch.float32: 3e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
"""Largest norm of a difference, as a fraction of the exact tensor's norm (of 1 where that is smaller)."""
PAIRS = [(operator, each.name) for operator in operators() for each in implementations(operator)]


def drawer(operator: str) -> Callable[[Pick], Example]:
    """The `draw` function of the operator's cases.py."""
    found: Callable[[Pick], Example] = importlib.import_module(f"xscale_kernels.{operator}.cases").draw
    return found


def fixed(operator: str, seed: int = 1) -> Example:
    """Draw a reproducible example; seeds are tried until every tensor has elements."""
    draw = drawer(operator)
    for attempt in range(seed, seed + 1000):
        chance = random.Random(attempt)
        example = draw(Pick(chance.randint, torch.Generator().manual_seed(attempt)))
        if all(each.numel() for each in example.tensors):
            return example
    raise AssertionError(f"{operator}'s examples are all empty")


@st.composite
def examples(draw: Any, operator: str) -> Example:
    """Draw examples by Hypothesis, which shrinks failures to small sizes."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return drawer(operator)(Pick(lambda low, high: draw(st.integers(low, high)), generator))


def laid(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """Copy a tensor into another memory layout."""
    if how == "sparse" and tensor.dim():
        room = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), torch.nan)
        room[..., ::2] = tensor
        return room[..., ::2]
    if how == "turned" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor.contiguous()


LAYOUTS = ("plain", "sparse", "turned")


def check(
    example: Example,
    name: str | None,
    dtype: torch.dtype,
    how: str = "plain",
    device: str = "cpu",
    bounds: dict[torch.dtype, float] = BOUNDS,
) -> None:
    """Compare results and gradients of one call with the definition in float64 on the same values."""
    near = [laid(each.to(device, dtype), how).detach() for each in example.tensors]
    far = [each.detach().double().clone() for each in near]
    given = [each.to(device) for each in example.given]
    for each in (*near, *far):
        each.requires_grad_(example.learns)
    got, wanted = as_tuple(example.run(*near, *given, implementation=name)), as_tuple(example.exact(*far, *given))
    bound = bounds[dtype] * example.slack
    assert len(got) == len(wanted)
    for at, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        close(ours, theirs, bound, f"result {at}")
    if not example.learns:
        return
    pairs = [(ours, theirs) for ours, theirs in zip(got, wanted, strict=True) if theirs.requires_grad]
    assert all(ours.requires_grad for ours, _ in pairs), "a result carries no gradient"
    generator = torch.Generator(device).manual_seed(0)
    seeds = [
        torch.randn(theirs.shape, generator=generator, dtype=theirs.dtype, device=device).to(ours.dtype)
        for ours, theirs in pairs
    ]
    found = gradients([ours for ours, _ in pairs], near, seeds)
    expected = gradients([theirs for _, theirs in pairs], far, [seed.double() for seed in seeds])
    for at, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.dtype == dtype, f"gradient {at} is {ours.dtype}, its tensor {dtype}"
        close(ours, theirs, bound, f"gradient {at}")


def gradients(
    results: list[torch.Tensor], tensors: list[torch.Tensor], seeds: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(results, tensors, seeds, allow_unused=True, materialize_grads=True)


def close(ours: torch.Tensor, theirs: torch.Tensor, bound: float, what: str) -> None:
    assert ours.shape == theirs.shape, f"{what}: {[*ours.shape]} instead of {[*theirs.shape]}"
    if not theirs.is_floating_point():
        assert torch.equal(ours, theirs), what
        return
    difference, size = (ours.double() - theirs).norm().item(), theirs.norm().item()
    assert difference <= bound * max(1.0, size), f"{what}: {difference} off, of {size}"


def refused(
    operator: str, name: str, example: Example, device: str = "cpu", dtype: torch.dtype = torch.float64
) -> str | None:
    """Reason why the implementation refuses the example, or None."""
    tensors = [each.to(device, dtype) for each in example.tensors] + [each.to(device) for each in example.given]
    try:
        example.run(*tensors, implementation=name)
    except UnusableError as reason:
        return str(reason)
    return None
