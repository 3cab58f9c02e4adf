"""State that modules keep from one segment of a stream of text to the next, such as the memory of Transformer-XL.

A row of the batch reads consecutive segments of its own text (`data.order: streams`). A module says what it keeps for
each row (`Module.carries`). In a forward it gets by `SEGMENT_STATE` what it kept of the segment before, and puts there
what it keeps of this one. The run holds the tensors of its rows, commits them when a step is done, and saves them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from xscale.nn.signals import BATCH, Signal, TokenAxes


@dataclass(frozen=True)
class CarriedTensor:
    """A tensor that a module keeps for each row, between segments."""

    shape: tuple[int, ...]
    """Shape without the rows."""
    dtype: torch.dtype | None = None
    """None: that of hidden states."""
    fill: int = 0
    """Value where there is no segment before."""


class SegmentStates:
    """The carried tensors of the rows that a rank has, by full name. No gradient passes from segment to segment."""

    def __init__(
        self,
        carried: Mapping[str, CarriedTensor],
        rows: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows = rows
        self._fills = {name: about.fill for name, about in carried.items()}
        self.tensors = {
            name: torch.full(
                (rows, *about.shape), about.fill, dtype=about.dtype or dtype, device=device
            )
            for name, about in carried.items()
        }
        """Name -> [rows, ...] as the last committed step left it, in place: what a checkpoint stores and fills."""
        self._pending: dict[tuple[str, int], Tensor] = {}

    def of_rows(self, first: int, count: int) -> "RowStates":
        """Return the states of `count` rows from the local row `first` on."""
        assert first + count <= self.rows, "the rank has fewer rows"
        return RowStates(self, first, count)

    def commit(self) -> None:
        """Make what the rows have put since the last commit the state before their next segments."""
        for (name, first), value in self._pending.items():
            self.tensors[name][first : first + len(value)].copy_(value)
        self._pending.clear()

    def drop_pending(self) -> None:
        """Drop what the rows have put since the last commit."""
        self._pending.clear()

    def reset(self) -> None:
        """Drop all states: the next segment of each row has none before it."""
        self._pending.clear()
        for name, tensor in self.tensors.items():
            tensor.fill_(self._fills[name])

    def put(self, name: str, first: int, value: Tensor) -> None:
        """Keep the value [rows of a micro-batch, ...] of a tensor, for the next commit."""
        kept = self.tensors[name]
        self._pending[name, first] = value.detach().to(kept.dtype)


@dataclass(frozen=True)
class RowStates:
    """The states of the rows of one micro-batch."""

    states: SegmentStates
    first: int
    count: int

    def get(self, name: str) -> Tensor:
        """Return the tensor [B, ...] of that full name, after the segment before."""
        return self.states.tensors[name][self.first : self.first + self.count]

    def put(self, name: str, value: Tensor) -> None:
        """Keep a tensor [B, ...] for the next segment."""
        self.states.put(name, self.first, value)


SEGMENT_STATE = Signal[RowStates]("segments.state")
"""States of the rows of this micro-batch; None: there is nothing before the segment, and nothing is kept of it."""
BEGINS = Signal[Tensor]("segments.begins", TokenAxes((BATCH,), fill=True))
"""[B], whether the segment continues no earlier one of its row; None: each does."""
NEXT_DOCUMENT = Signal[Tensor]("segments.next_document", TokenAxes((BATCH,)))
"""[B], number of the document, as `Tokens.documents` count them, of the first token behind the segment; None:
attention crosses documents."""
