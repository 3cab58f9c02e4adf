"""Access to full tensors for optimizers that are not elementwise; where tensors are sharded, the engine substitutes it.

An optimizer holds the local shard of each weight. What depends on all of a weight it asks of these methods: means over
dims of the full tensor, and a function of whole matrices. Where weights are sharded they are collective.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

LARGEST_PART = 1 << 26
"""Elements of a stack of matrices that are computed with at a time, unless one matrix has more."""
MatrixFunction = Callable[[Tensor], Tensor]
"""From whole matrices [..., outputs, inputs] to matrices of the same shape."""


@dataclass(frozen=True)
class LocalSum:
    """Sum of the local elements of something of a weight's shape over some dims."""

    weight: int
    """Index of the weight."""
    dims: tuple[int, ...]
    """Dims of the weight that are summed over, from 0 up."""
    value: Tensor
    """The sum, without these dims."""


@dataclass(frozen=True)
class MatrixPart:
    """Matrices of one weight: [outputs, inputs], or the `rows` of a local stack of them."""

    weight: int
    rows: slice | None = None
    """None: the weight is one matrix."""

    def of(self, local: Tensor) -> Tensor:
        """View of the part of a local tensor of the weight's shape."""
        return local if self.rows is None else local[self.rows]


class FullTensors(Protocol):
    """The full weights behind the local shards. `means` and `map_matrices` are collective."""

    def shape(self, weight: int) -> tuple[int, ...]:
        """Return the shape of a full weight."""
        ...

    def means(self, sums: Sequence[LocalSum]) -> list[Tensor]:
        """Return each sum over all shards, divided by the number of summed elements of the full weight."""
        ...

    def map_matrices(
        self,
        weights: Sequence[int],
        operand: Callable[[MatrixPart], Tensor],
        function: MatrixFunction,
    ) -> Iterator[tuple[MatrixPart, Tensor]]:
        """Yield parts of those weights, and the local shard of `function` of the whole matrices of the part.

        `operand` returns the local shard of a part of what `function` gets, and is called when it is needed: only a few
        matrices are in memory at a time.
        """
        ...


@dataclass(frozen=True)
class UnshardedTensors:
    """Weights of which this process has every element."""

    values: Sequence[Tensor]

    def shape(self, weight: int) -> tuple[int, ...]:
        return tuple(self.values[weight].shape)

    def means(self, sums: Sequence[LocalSum]) -> list[Tensor]:
        return [
            total.value / math.prod(self.shape(total.weight)[dim] for dim in total.dims)
            for total in sums
        ]

    def map_matrices(
        self,
        weights: Sequence[int],
        operand: Callable[[MatrixPart], Tensor],
        function: MatrixFunction,
    ) -> Iterator[tuple[MatrixPart, Tensor]]:
        for weight in weights:
            for part in parts_of(weight, self.shape(weight)):
                yield part, function(operand(part))


def parts_of(weight: int, shape: tuple[int, ...], pieces: int = 1) -> list[MatrixPart]:
    """Divide a weight of that shape into parts: at least `pieces` of a stack, if it has as many matrices.

    A part of a stack has at most LARGEST_PART elements, or one matrix.
    """
    if len(shape) == 2:
        return [MatrixPart(weight)]
    largest = max(1, LARGEST_PART // max(1, math.prod(shape[1:])))
    step = max(1, min(largest, -(-shape[0] // pieces)))
    return [
        MatrixPart(weight, slice(first, min(first + step, shape[0])))
        for first in range(0, shape[0], step)
    ]
