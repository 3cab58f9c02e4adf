"""Pairs of queries and keys by their distance, for positions whose terms of the scores read the query or the key.

Such a term is computed for each query and distance, [B, H, T, R], and shifted to queries and keys, [B, H, T, S]: the
relative shift of Dai et al. 2019 (appendix B), the skewing of Huang et al. 2019. No tensor has T x S x K elements.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """T queries, of which the first is key number `offset`, and S keys, in the order of the sequence.

    A distance is a difference of indices: within a document, positions count tokens.
    """

    queries: int
    """T."""
    keys: int
    """S."""
    offset: int = 0
    causal: bool = False
    """Whether terms of later keys are never read, so that half of the distances suffice."""
    query_factor: float = 1.0
    """Factor that the queries have from the mixer, and that terms of the scores without a query need."""
    heads: Tensor | None = None
    """Indices of the heads among those of the position's parameters; None: all."""
    project: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    """The mixer's projections of [N, D] to queries [H, N, K] and keys [H, N, K]."""

    def distances(self, device: torch.device) -> Tensor:
        """Return the distances key - query [R] that the columns of `shift` stand for, ascending.

        The last column is never read, and repeats the last distance that is.
        """
        first = 1 - self.queries - self.offset
        if self.causal:
            return torch.arange(first, 2, device=device).clamp(max=0)
        last = self.keys - 1 - self.offset
        return torch.arange(first, last + 2, device=device).clamp(max=last)

    def shift(self, by_distance: Tensor) -> Tensor:
        """Return the values of queries and keys [..., T, S] from those of queries and distances [..., T, R].

        A view. Where `causal`, what stands at later keys is arbitrary.
        """
        rows, columns = by_distance.shape[-2:]
        flat = by_distance.flatten(-2).narrow(-1, rows - 1, rows * (columns - 1))
        return flat.view(*flat.shape[:-1], rows, columns - 1)[..., : self.keys]  # [..., T, S]

    def unshift(self, by_key: Tensor) -> Tensor:
        """Return the values of queries and distances [..., T, R] from those of queries and keys [..., T, S].

        The reverse of `shift`: distances without a key get 0, and where `causal` later keys must have 0.
        """
        rows = by_key.shape[-2]
        columns = len(self.distances(torch.device("cpu")))
        flat = F.pad(by_key, (0, columns - 1 - self.keys)).flatten(-2)
        return F.pad(flat, (rows - 1, 1)).view(*by_key.shape[:-1], columns)  # [..., T, R]

    def select_heads(self, values: Tensor) -> Tensor:
        """Return the heads of these pairs, of [H, ...]."""
        return values if self.heads is None else values.index_select(0, self.heads)


@dataclass(frozen=True)
class PositionPairs(Pairs):
    """Pairs of tokens whose distances are differences of their positions, as in a sequence that was shortened."""

    differences: Tensor | None = None
    """[B, T, S] position of the key minus that of the query."""
    length: int = 0
    """Positions are below it."""

    @staticmethod
    def of(pairs: Pairs, queries: Tensor, keys: Tensor, length: int) -> "PositionPairs":
        """Return the pairs at positions [B, T] of queries and [B, S] of keys, all below `length`."""
        values = {field.name: getattr(pairs, field.name) for field in fields(Pairs)}
        return PositionPairs(
            **values, differences=keys[:, None] - queries[..., None], length=length
        )

    def distances(self, device: torch.device) -> Tensor:
        return torch.arange(1 - self.length, self.length, device=device)

    def shift(self, by_distance: Tensor) -> Tensor:
        # The terms of a batch may be one for all of its samples: [B or 1, H, T, R].
        heads, columns = by_distance.shape[1], self._columns[:, None]
        by_distance = by_distance.expand(len(columns), -1, columns.shape[2], -1)
        return by_distance.gather(-1, columns.expand(-1, heads, -1, -1))  # [B, H, T, S]

    def unshift(self, by_key: Tensor) -> Tensor:
        empty = by_key.new_zeros(*by_key.shape[:-1], 2 * self.length - 1)
        columns = self._columns[:, None].expand_as(by_key)
        return empty.scatter_add(-1, columns, by_key)  # [..., T, R]

    @property
    def _columns(self) -> Tensor:
        assert self.differences is not None
        return self.differences + (self.length - 1)  # [B, T, S]
