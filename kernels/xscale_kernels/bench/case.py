"""One problem of a benchmark and the ways to compute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from xscale_kernels.select import Implementation


@dataclass(frozen=True)
class Case:
    """An operator's bench.py returns a list of these from `cases(device)`."""

    label: str
    """The sizes, as the table prints them."""
    ways: Mapping[str, Callable[[], object]]
    """Implementation name to one forward and backward; "eager" is the definition in plain torch."""
    flops: float = 0.0
    """Operations that any way must do, forward and backward; 0 where bytes decide."""
    bytes: float = 0.0
    """Bytes that any way must move: each input and output once, forward and backward."""
    at: Mapping[str, float] = field(default_factory=dict)
    """Where the case stands on the axes of plots: length, density, vocabulary ..."""
    says: Mapping[str, str] = field(default_factory=dict)
    """Way to what it computes, where its name could be taken for something else."""


class BothWays:
    """A function of nothing: forward of `function(*inputs)` and backward to the inputs that require gradients."""

    def __init__(self, function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        self.function, self.inputs = function, inputs
        self.leaves = [each for each in inputs if each.requires_grad]
        self.seed: torch.Tensor | None = None

    def __call__(self) -> object:
        out = self.function(*self.inputs)
        if self.seed is None:
            self.seed = torch.randn_like(out)
        return torch.autograd.grad(out, self.leaves, self.seed)


def both_ways(
    function: Callable[..., torch.Tensor],
    eager: Callable[..., torch.Tensor],
    implementations: Sequence[Implementation],
    inputs: Sequence[torch.Tensor],
) -> dict[str, Callable[[], object]]:
    """`eager(*inputs)`, and `function(*inputs, implementation=name)` for each implementation but the reference."""
    names = [each.name for each in implementations if each.name != "reference"]
    ways: dict[str, Callable[[], object]] = {"eager": BothWays(eager, inputs)}
    return ways | {name: BothWays(partial(function, implementation=name), inputs) for name in names}
