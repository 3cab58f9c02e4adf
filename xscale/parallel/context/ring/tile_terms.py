"""Terms of a position on a tile of the ring's scores and outputs, with their gradients.

A tile's graph is built again in the backward of the ring, where the position's parameters are inputs: each rank has the
gradient of its own queries' tiles, and the sum over cp that every parameter gets makes them whole.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xscale.nn.attention.ops.dense import upcast
from xscale.nn.module import Module, substitute
from xscale.nn.position.pairs import Pairs
from xscale.nn.position.position import Position


@dataclass(frozen=True)
class PositionParameters:
    """The parameters that the terms of a position read."""

    modules: tuple[Module, ...]

    @staticmethod
    def of(parts: Sequence[nn.Module | None]) -> "PositionParameters":
        """Return those of `parts` and of the modules in them."""
        modules = [module for part in parts if part is not None for module in part.modules()]
        return PositionParameters(
            tuple(module for module in dict.fromkeys(modules) if isinstance(module, Module))
        )

    def used(self) -> list[Tensor]:
        """Return the parameters as forward computes with them: local and in compute dtype."""
        return [
            module.use(parameter)
            for module in self.modules
            for parameter in module.parameters(recurse=False)
        ]

    @contextmanager
    def replaced(self, values: Sequence[Tensor]) -> Iterator[None]:
        """While it lasts the modules compute with `values`, in the order of `used`."""
        hooks, remaining = [module.param_hook for module in self.modules], iter(values)
        try:
            for module in self.modules:
                names = {
                    id(parameter): next(remaining) for parameter in module.parameters(recurse=False)
                }
                substitute(
                    module, "param_hook", lambda parameter, names=names: names[id(parameter)]
                )
            yield
        finally:
            for module, hook in zip(self.modules, hooks, strict=True):
                substitute(module, "param_hook", hook)


@dataclass(frozen=True)
class TileTerms:
    """Terms that a position adds to the scores and the output of a tile of T queries and S keys."""

    position: Position
    pairs: Pairs | None
    """The tile's queries and keys, for a position whose terms read them; None: it adds a bias."""
    places: tuple[Tensor, Tensor]
    """Positions of the queries [B, T] and of the keys [B, S]."""
    dtype: torch.dtype
    """Dtype of the terms."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return what is added to the scores [B or 1, G, H/G, T, S] of q [B, G, H/G, T, K] and k [B, G, S, K]."""
        if self.pairs is None:
            added = self.position.bias(*self.places)
            assert added is not None
        else:
            added = self.position.scores(
                q.flatten(1, 2).to(self.dtype), k.to(self.dtype), self.pairs
            )
        return _grouped(added, q)

    def values(self, weights: Tensor) -> Tensor | None:
        """Return what is added to the output [B, G, H/G, T, K] of weights [B, G, H/G, T, S]; None: nothing."""
        if self.pairs is None or not self.position.adds_values:
            return None
        added = self.position.values(weights.flatten(1, 2).to(self.dtype), self.pairs)
        return _grouped(added, weights)


def _grouped(x: Tensor, like: Tensor) -> Tensor:
    """[B or 1, H, ...] -> [B or 1, G, H/G, ...], the heads and dtype of `like`."""
    return upcast(x).reshape(x.shape[0], *like.shape[1:3], *x.shape[2:]).to(like.dtype)


@dataclass
class TermGradients:
    """Gradients of what the terms of the tiles read: one sum for each parameter; None where no tile has read it."""

    leaves: list[Tensor]
    """The parameters, each the leaf of the tiles' graphs."""
    sums: list[Tensor | None]

    @staticmethod
    def of(used: Sequence[Tensor]) -> "TermGradients":
        """Begin with no gradients of the parameters `used`."""
        return TermGradients([x.detach().requires_grad_() for x in used], [None] * len(used))

    def through(self, added: Tensor, gradient: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Add the parameters' gradients through `added`; return those of `inputs`, zeros where it reads them not."""
        if not added.requires_grad:
            return tuple(torch.zeros_like(x) for x in inputs)
        leaves = (*inputs, *self.leaves)
        gradients = torch.autograd.grad(
            added, leaves, gradient.sum_to_size(added.shape), allow_unused=True
        )
        for number, new in enumerate(gradients[len(inputs) :]):
            if new is not None:
                total = self.sums[number]
                self.sums[number] = upcast(new) if total is None else total + upcast(new)
        return tuple(
            torch.zeros_like(x) if new is None else new
            for x, new in zip(inputs, gradients[: len(inputs)], strict=True)
        )
