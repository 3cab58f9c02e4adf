"""The seam of expert parallelism: how rows sorted by expert reach the experts and come back."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

RowsToRows = Callable[[Tensor, Tensor], Tensor]
"""(rows [M, D] sorted by expert, counts [local experts]) -> [M, D]."""


class Dispatch(Protocol):
    """Whoever holds the experts elsewhere puts another object with this call in the place of `Local`."""

    def __call__(self, rows: Tensor, counts: Tensor, experts: RowsToRows) -> Tensor:
        """Rows [M, D] sorted by expert, counts [E] over *all* experts -> each row's output [M, D], in the same order.

        `experts` takes rows sorted by the experts that are here, and their counts.
        """
        ...


class Local:
    """All experts are here."""

    def __call__(self, rows: Tensor, counts: Tensor, experts: RowsToRows) -> Tensor:
        return experts(rows, counts)
