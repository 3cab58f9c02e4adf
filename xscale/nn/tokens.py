"""What a model is told about its tokens beside their hidden states, and what it tells back."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


class Tally:
    """Means of statistics from inside the model: a recomputed forward adds its value again, so nothing counts twice."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Add one observation (a fraction or a mean over the tokens of this forward) of `name`."""
        # Exactly the same sums however the micro-batches are dealt out.
        value = value.detach().double()
        self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._counts[name] = self._counts.get(name, 0) + 1

    def means(self) -> dict[str, Tensor]:
        """Name -> mean over the observations."""
        return {name: total / self._counts[name] for name, total in self._sums.items()}


@dataclass(frozen=True)
class Tokens:
    """One micro-batch of tokens."""

    ids: Tensor
    """[B, T] token ids."""
    positions: Tensor
    """[B, T] place of each token, counted from its document's start when documents are kept apart."""
    documents: Tensor | None = None
    """[B, T] number of the document each token belongs to; attention stays within it. None: one document a row."""
    noise: int | None = None
    """Seed of this micro-batch's random numbers (dropout, router noise). None: no noise, as in evaluation."""
    auxiliary: float | None = None
    """What one unit of an auxiliary loss weighs in this micro-batch's backward. None: no auxiliary loss."""
    tally: Tally | None = None
    """Where parts leave their statistics; None: nobody asks."""
    cache: dict[str, Any] | None = None
    """State of each mixer by its path while generating; None otherwise."""
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Values that every layer would compute alike, such as the rotations of RoPE."""

    @staticmethod
    def of(ids: Tensor, documents: Tensor | None = None, **others: Any) -> "Tokens":
        """Tokens at their natural positions: 0, 1, 2 ... from the start of each document."""
        count = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)  # [B, T]
        if documents is not None:
            fresh = torch.ones_like(documents, dtype=torch.bool)
            fresh[:, 1:] = documents[:, 1:] != documents[:, :-1]
            starts = torch.where(fresh, count, 0).cummax(dim=1).values
            count = count - starts
        return Tokens(ids=ids, positions=count, documents=documents, **others)

    def behind(self, count: int) -> "Tokens":
        """The same behind `count` places that hold no words, which count from 0; one document a row."""
        if not count:
            return self
        assert self.documents is None, "what stands before a row belongs to none of its documents"
        places = torch.arange(count, device=self.ids.device).expand(len(self.ids), -1)
        return replace(
            self,
            ids=torch.cat((torch.zeros_like(places), self.ids), 1),
            positions=torch.cat((places, self.positions + count), 1),
            memo={},
        )

    def to(self, device: torch.device) -> "Tokens":
        """The same on a device."""
        documents = None if self.documents is None else self.documents.to(device, non_blocking=True)
        return replace(
            self,
            ids=self.ids.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            documents=documents,
        )
