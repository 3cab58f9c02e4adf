"""The classes of an operator's cases.py: test examples, which the conformance suite draws, and benchmark cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from xscale_kernels.select import Implementation

T = TypeVar("T")
Tensors = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Pick:
    """Source of an example's sizes and random numbers."""

    integer: Callable[[int, int], int]
    """An integer between two bounds, both included."""
    generator: torch.Generator
    """Generator of the tensors' values."""

    def choice(self, *options: T) -> T:
        """Pick one of the options."""
        return options[self.integer(0, len(options) - 1)]

    def normal(self, *shape: int) -> torch.Tensor:
        """Draw a float64 tensor of standard normal values."""
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """Draw an int64 tensor of values below `high`."""
        return torch.randint(0, high, shape, generator=self.generator)


@dataclass(frozen=True)
class Example:
    """One call of an operator, and its definition."""

    run: Callable[..., Any]
    """run(*tensors, *given, implementation=name): a tensor or a tuple of tensors."""
    exact: Callable[..., Any]
    """exact(*tensors, *given): the definition in plain torch, called in float64."""
    tensors: tuple[torch.Tensor, ...]
    """Float64 inputs, which the suite casts to each precision and whose gradients it compares."""
    given: tuple[torch.Tensor, ...] = ()
    """Further inputs, such as indices and angles: they keep their dtype and get no gradient."""
    learns: bool = True
    """Whether autograd gives gradients."""
    slack: float = 1.0
    """Factor on the tolerance, for long sums and exponentials."""
    products: bool = False
    """Whether it multiplies matrices, which Triton's interpreter does wrongly in bfloat16."""


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    """Wrap a single tensor as a tuple."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


@dataclass(frozen=True)
class Case:
    """One set of sizes; `cases(device)` of an operator's cases.py returns a list of cases."""

    label: str
    """The sizes, as the table prints them."""
    ways: Mapping[str, Callable[[], object]]
    """Implementation name to one forward and backward; "eager" is the definition in plain torch."""
    flops: float = 0.0
    """FLOPs that every implementation needs, forward and backward; 0 for memory-bound operators."""
    bytes: float = 0.0
    """Bytes that every implementation must move: each input and output once, forward and backward."""
    at: Mapping[str, float] = field(default_factory=dict)
    """Coordinates on the axes of the plots: length, density, vocabulary ..."""
    says: Mapping[str, str] = field(default_factory=dict)
    """Implementation name -> what it computes, where the name alone would mislead."""


class ForwardBackward:
    """A call without arguments: forward of `function(*inputs)` and backward to the inputs that require gradients."""

    def __init__(
        self, function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        self.function, self.inputs = function, inputs
        self.leaves = [tensor for tensor in inputs if tensor.requires_grad]
        self.seed: torch.Tensor | None = None

    def __call__(self) -> object:
        out = self.function(*self.inputs)
        if self.seed is None:
            self.seed = torch.randn_like(out)
        return torch.autograd.grad(out, self.leaves, self.seed)


def forward_backward(
    function: Callable[..., torch.Tensor],
    eager: Callable[..., torch.Tensor],
    implementations: Sequence[Implementation],
    inputs: Sequence[torch.Tensor],
) -> dict[str, Callable[[], object]]:
    """Name -> forward and backward: "eager" for `eager(*inputs)`, and each implementation except the reference.

    An implementation is called as `function(*inputs, implementation=name)`.
    """
    names = [entry.name for entry in implementations if entry.name != "reference"]
    ways: dict[str, Callable[[], object]] = {"eager": ForwardBackward(eager, inputs)}
    return ways | {
        name: ForwardBackward(partial(function, implementation=name), inputs) for name in names
    }
