"""Terms of relative positions in block-sparse attention, computed for a chunk of blocks at a time.

A block of Q queries and a block of b keys have Q + b - 1 distances. Queries (or keys) are multiplied with the rows of
these distances, and a strided view shifts the products to queries and keys (the skewing of Huang et al. 2019, section
3.4), so that memory grows with the blocks that are seen. Backward computes the terms of a chunk again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.nn.attention.ops.block_plan import UnitChunk
from xscale.nn.position.distance_tables import DistanceTables

NAMES = tuple(field.name for field in fields(DistanceTables))


@dataclass(frozen=True)
class BlockTerms:
    """Places of the tables' rows. `tables` below are those of NAMES, in float32 at least."""

    first: int
    """Distance key - query of the tables' first row; nearer and farther ones have the first and the last row."""
    first_query: int
    """Position of the first query."""
    queries: int
    """Q, queries of a block."""
    block: int
    """b, keys of a block."""
    scale: float
    """1 / sqrt(K)."""

    @property
    def span(self) -> int:
        """Distances of a block of queries and one of keys."""
        return self.queries + self.block - 1

    def scores(self, tables: Sequence[Tensor | None], chunk: UnitChunk, q: Tensor, k: Tensor) -> Tensor:
        """Return the terms [U, Q, d*b] of q [U, Q, K], which has the scale, and k [U, d*b, K]. Differentiable."""
        query_rows, key_rows, bias, _, content_bias, position_bias = tables
        units, degree = chunk.columns.shape
        dtype = next(table.dtype for table in tables if table is not None)
        q, k, index, total = q.to(dtype), k.to(dtype), self._rows(tables, chunk), q.new_zeros((), dtype=dtype)
        by_query: Tensor | None = None
        if query_rows is not None:
            rows = _of_heads(query_rows, chunk, index)  # [U, d, W, K]
            added = 0.0 if position_bias is None else self.scale * _of_heads(position_bias, chunk)[:, None]
            by_query = (q + added) @ rows.flatten(1, 2).mT  # [U, Q, d*W]
        if bias is not None:
            by_distance = _of_heads(bias, chunk, index).flatten(1)[:, None]  # [U, 1, d*W]
            by_query = by_distance.expand(-1, self.queries, -1) if by_query is None else by_query + by_distance
        if by_query is not None:
            total = total + self._by_key(by_query.reshape(units, self.queries, degree, self.span))
        if key_rows is not None:
            rows = _of_heads(key_rows, chunk, index).flip(2)  # [U, d, W, K], by descending distance
            by_key = (self.scale * k).view(units, degree, self.block, -1) @ rows.mT  # [U, d, b, W]
            total = total + self._by_query(by_key).permute(0, 3, 1, 2)
        if content_bias is not None:
            content = (self.scale * _of_heads(content_bias, chunk))[:, None] @ k.mT  # [U, 1, d*b]
            total = total + content.view(units, 1, degree, self.block)
        return total.expand(units, self.queries, degree, self.block).flatten(2)

    def values(self, tables: Sequence[Tensor | None], chunk: UnitChunk, weights: Tensor) -> Tensor:
        """Return what the tables add to the output, [U, Q, K], of weights [U, Q, d*b]. Differentiable."""
        rows = tables[NAMES.index("value_rows")]
        assert rows is not None
        units, degree = chunk.columns.shape
        by_distance = rows.new_zeros(units, self.queries, degree, self.span)
        self._by_key(by_distance).copy_(weights.view(units, self.queries, degree, self.block))
        return by_distance.flatten(2) @ _of_heads(rows, chunk, self._rows(tables, chunk)).flatten(1, 2)

    def _by_key(self, by_distance: Tensor) -> Tensor:
        """View [U, Q, d, W], by distance, as [U, Q, d, b], by key."""
        units, _, degree, span = by_distance.shape
        size = (units, self.queries, degree, self.block)
        row = degree * span
        stride = (self.queries * row, row - 1, span, 1)
        return by_distance.contiguous().as_strided(size, stride, self.queries - 1)

    def _by_query(self, by_distance: Tensor) -> Tensor:
        """View [U, d, b, W], by key and descending distance, as [U, d, b, Q], by query."""
        units, degree, block, span = by_distance.shape
        stride = (degree * block * span, block * span, span - 1, 1)
        return by_distance.contiguous().as_strided((units, degree, block, self.queries), stride, block - 1)

    def _rows(self, tables: Sequence[Tensor | None], chunk: UnitChunk) -> Tensor:
        """Index [U, d, W] of the rows of each block's distances, which ascend."""
        query_rows, key_rows, bias, value_rows, *_ = tables
        count = next(x.shape[1] for x in (query_rows, key_rows, bias, value_rows) if x is not None)
        nearest = chunk.columns * self.block - (self.first_query + chunk.rows * self.queries)[:, None]  # [U, d]
        distances = torch.arange(self.span, device=nearest.device) - (self.queries - 1)
        return (nearest[..., None] + distances - self.first).clamp_(0, count - 1)


def _of_heads(table: Tensor, chunk: UnitChunk, index: Tensor | None = None) -> Tensor:
    """Rows of a table [H or 1, ...] of each unit's head; with `index` [U, d, W], those rows of it."""
    heads = chunk.heads if table.shape[0] > 1 else torch.zeros_like(chunk.heads)
    if index is None:
        return table[heads]
    # Its gradient is a sum of rows, which an index of several tensors would sort first.
    rows = F.embedding(
        heads[:, None, None] * table.shape[1] + index, table.reshape(table.shape[0] * table.shape[1], -1)
    )
    return rows.squeeze(-1) if table.ndim == 2 else rows


class TableGradients:
    """Sums the gradients of the tables over the chunks, which autograd computes of the terms of each."""

    def __init__(self, terms: BlockTerms | None, tables: Sequence[Tensor | None]) -> None:
        self.terms = terms
        self.leaves = [None if table is None else table.detach().requires_grad_() for table in tables]
        self.sums = [None if table is None else torch.zeros_like(table) for table in tables]

    def add_scores(self, chunk: UnitChunk, q: Tensor, k: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of the scores' terms, given their gradient [U, Q, d*b]; return those of q and k."""
        assert self.terms is not None
        with torch.enable_grad():
            q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
            scores = self.terms.scores(self.leaves, chunk, q, k)
        of_q, of_k = self._add(scores, (q, k), gradient.to(scores.dtype))
        return of_q, of_k

    def add_values(self, chunk: UnitChunk, weights: Tensor, gradient: Tensor) -> Tensor:
        """Add those of the output's terms, given their gradient [U, Q, K]; return that of the weights [U, Q, d*b]."""
        assert self.terms is not None
        with torch.enable_grad():
            weights = weights.detach().requires_grad_()
            values = self.terms.values(self.leaves, chunk, weights)
        (of_weights,) = self._add(values, (weights,), gradient.to(values.dtype))
        return of_weights

    def _add(self, y: Tensor, inputs: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, ...]:
        known = [leaf for leaf in self.leaves if leaf is not None]
        gradients = torch.autograd.grad(y, (*inputs, *known), gradient, allow_unused=True, materialize_grads=True)
        sums = [total for total in self.sums if total is not None]
        for total, part in zip(sums, gradients[len(inputs) :], strict=True):
            total += part
        return gradients[: len(inputs)]
