"""What the tests feed an operator: each folder's examples.py draws one of these, so that a new operator is tested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Tensors = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Pick:
    """Where an example's sizes and numbers come from."""

    integer: Callable[[int, int], int]
    """A whole number between two, both included."""
    generator: torch.Generator
    """Of the numbers."""

    def choice(self, *options: T) -> T:
        """One of the options."""
        return options[self.integer(0, len(options) - 1)]

    def normal(self, *shape: int) -> torch.Tensor:
        """Of float64."""
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """Whole numbers below `high`."""
        return torch.randint(0, high, shape, generator=self.generator)


@dataclass(frozen=True)
class Example:
    """One call of an operator, and its definition."""

    run: Callable[..., Any]
    """run(*tensors, *given, implementation=name): a tensor or a tuple of tensors."""
    exact: Callable[..., Any]
    """exact(*tensors, *given): the same in plain torch, to be called in float64."""
    tensors: tuple[torch.Tensor, ...]
    """Float64; given in any precision, and those whose gradient is compared."""
    given: tuple[torch.Tensor, ...] = ()
    """Further tensors: indices, angles. They keep their dtype and get no gradient."""
    learns: bool = True
    """Whether gradients are defined by autograd."""
    slack: float = 1.0
    """How much larger than usual rounding may grow, where sums are long or exponentials are taken."""
    products: bool = False
    """Whether it multiplies matrices; Triton's interpreter does that wrongly in bfloat16."""


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    """A tensor or several, as several."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)
