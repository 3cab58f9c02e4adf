"""Products of blocks of queries or keys with adjacent rows of a table, where many blocks read the same rows."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

BATCHED = 4
"""Groups of blocks from which on their products are one batched product on a CPU, for which their rows are copied."""


@dataclass(frozen=True)
class TableRows:
    """W adjacent rows of a table for each of C blocks.

    Rows before the table's first are its first, those after its last are its last.
    """

    width: int
    """W."""
    heads: Tensor
    """[C]."""
    first: Tensor
    """[C], index of the first row, up to `offset`; maybe outside of the table."""
    groups: tuple[tuple[int, int, int, int], ...]
    """Start and stop of blocks that follow each other and have one head and one first row, and these."""
    offset: int = 0
    """Added to `first`."""

    @classmethod
    def of(cls, first: Tensor, heads: Tensor, width: int) -> "TableRows":
        """Describe the rows of blocks with these first rows [C] and heads [C]."""
        groups: list[list[int]] = []
        for at, (head, row) in enumerate(zip(heads.tolist(), first.tolist(), strict=True)):
            if groups and groups[-1][2:] == [head, row]:
                groups[-1][1] = at + 1
            else:
                groups.append([at, at + 1, head, row])
        return cls(
            width,
            heads,
            first,
            tuple((start, stop, head, row) for start, stop, head, row in groups),
        )

    def shifted(self, offset: int) -> "TableRows":
        """Return the rows that begin so much later in the table."""
        return replace(self, offset=offset)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Identity of the rows of all groups, whatever the blocks."""
        sizes = () if self.group_size else tuple(stop - start for start, stop, *_ in self.groups)
        return self.width, self.offset, sizes, tuple(group[2:] for group in self.groups)

    @cached_property
    def group_size(self) -> int | None:
        """Blocks of each group; None: groups differ."""
        sizes = {stop - start for start, stop, *_ in self.groups}
        return sizes.pop() if len(sizes) == 1 else None

    def batch(self, cuda: bool) -> int | None:
        """Return how many blocks share the rows of one product of a batch; None: take a product for each group."""
        if cuda:
            return self.group_size or 1
        return self.group_size if len(self.groups) >= BATCHED else None

    def index(self, count: int, step: int = 1) -> Tensor:
        """Return flat indices [C / step, W] in a table [H or 1, count], of the rows of every `step`-th block."""
        rows = (
            self.first[::step, None]
            + self.offset
            + torch.arange(self.width, device=self.first.device)
        )
        return self.heads[::step, None] * count + rows.clamp_(0, count - 1)

    def slices(self, count: int) -> Iterator[tuple[slice, int, "RowSlice"]]:
        """Yield the blocks of a group, their head, and where their rows are in a table of `count`."""
        for start, stop, head, first in self.groups:
            yield slice(start, stop), head, RowSlice.of(first + self.offset, self.width, count)


@dataclass(frozen=True)
class RowSlice:
    """Rows of a table for adjacent distances, of which those outside of the table repeat its first or last row."""

    rows: slice
    """Rows that are read."""
    columns: slice
    """Columns, of all distances, for which they are read."""
    before: slice
    """Columns that repeat the first row that is read."""
    after: slice
    """Columns that repeat the last."""

    @classmethod
    def of(cls, first: int, width: int, count: int) -> "RowSlice":
        """Describe `width` rows from `first` on in a table of `count`."""
        low, high = (min(max(row, 0), count - 1) for row in (first, first + width - 1))
        columns = high + 1 - low
        start = min(max(low - first, 0), width - columns)
        stop = start + columns
        return cls(slice(low, high + 1), slice(start, stop), slice(0, start), slice(stop, width))

    @property
    def repeats(self) -> Iterator[tuple[slice, int, int]]:
        """Columns that repeat a row, the row, and its own column; only where there are any."""
        sides = (
            (self.before, self.rows.start, self.columns.start),
            (self.after, self.rows.stop - 1, -1),
        )
        for columns, row, column in sides:
            if columns.start < columns.stop:
                yield columns, row, self.columns.stop - 1 if column < 0 else column


class TableProducts:
    """A table [H or 1, N, K] and the sums of its gradients.

    Blocks that read the same rows are one product, with a view of the table, or one of a batch, with a copy of them.
    Chunk after chunk of a head mostly reads the same rows: a copy, and the sum of its gradients, serves all of them.
    """

    def __init__(self, table: Tensor) -> None:
        self.table = table.contiguous()
        self._sums = torch.zeros_like(self.table)
        self._copied: tuple[tuple[Any, ...], Tensor] | None = None
        """The last rows that were copied, and what they are."""
        self._summed: tuple[tuple[Any, ...], TableRows, Tensor] | None = None
        """Gradients of copied rows that are not yet in the sums, and what they are."""

    def multiply(self, x: Tensor, rows: TableRows, out: Tensor) -> None:
        """Write the products of x [C, m, K] with their rows to `out` [C, m, W]."""
        if step := rows.batch(x.is_cuda):
            torch.bmm(_grouped(x, step), self._copy(rows, step).mT, out=_grouped(out, step))
            return
        for blocks, head, part in rows.slices(self.table.shape[1]):
            flat = out[blocks].flatten(0, 1)  # [c * m, W]
            torch.mm(
                x[blocks].flatten(0, 1), self.table[head, part.rows].T, out=flat[:, part.columns]
            )
            for columns, _, column in part.repeats:
                flat[:, columns] = flat[:, column, None]

    def add_products(self, y: Tensor, rows: TableRows, sums: Tensor) -> None:
        """Add the products of y [C, m, W] with the rows of each column to `sums` [C, m, K]."""
        if step := rows.batch(y.is_cuda):
            _grouped(sums, step).baddbmm_(_grouped(y, step), self._copy(rows, step))
            return
        for blocks, head, part in rows.slices(self.table.shape[1]):
            flat, total = y[blocks].flatten(0, 1), sums[blocks].flatten(0, 1)
            total.addmm_(flat[:, part.columns], self.table[head, part.rows])
            for columns, row, _ in part.repeats:
                total.addr_(flat[:, columns].sum(1), self.table[head, row])

    def add_row_gradients(self, y: Tensor, rows: TableRows, x: Tensor) -> None:
        """Add the gradients of the rows that x [C, m, K] meets, given those of their products, y [C, m, W]."""
        if step := rows.batch(y.is_cuda):
            if self._summed is None or self._summed[0] != rows.key:
                self._add_summed()
                self._summed = rows.key, rows, x.new_zeros(len(x) // step, rows.width, x.shape[2])
            self._summed[2].baddbmm_(_grouped(y, step).mT, _grouped(x, step))
            return
        for blocks, head, part in rows.slices(self.table.shape[1]):
            flat, inputs = y[blocks].flatten(0, 1), x[blocks].flatten(0, 1)
            self._sums[head, part.rows].addmm_(flat[:, part.columns].T, inputs)
            for columns, row, _ in part.repeats:
                self._sums[head, row].addmv_(inputs.T, flat[:, columns].sum(1))

    def gradients(self) -> Tensor:
        """Return the sums of the gradients, [H or 1, N, K]."""
        self._add_summed()
        return self._sums

    def _add_summed(self) -> None:
        if self._summed is None:
            return
        _, rows, gradients = self._summed
        self._summed = None
        if gradients.is_cuda:
            index = rows.index(self.table.shape[1], len(rows.heads) // len(gradients))
            self._sums.view(-1, gradients.shape[2]).index_add_(
                0, index.flatten(), gradients.flatten(0, 1)
            )
            return
        # On a CPU to add slices takes less time than to add rows by their indices.
        for group, (_, head, part) in zip(gradients, rows.slices(self.table.shape[1]), strict=True):
            self._sums[head, part.rows].add_(group[part.columns])
            for columns, row, _ in part.repeats:
                self._sums[head, row].add_(group[columns].sum(0))

    def _copy(self, rows: TableRows, step: int) -> Tensor:
        """Rows of every `step`-th block, [C / step, W, K]."""
        if self._copied is None or self._copied[0] != rows.key:
            index = rows.index(self.table.shape[1], step)
            copy = self.table.flatten(0, 1).index_select(0, index.flatten()).view(*index.shape, -1)
            self._copied = rows.key, copy
        return self._copied[1]


def _grouped(x: Tensor, step: int) -> Tensor:
    """View blocks [C, m, N] as [C / step, step * m, N]."""
    return x.view(-1, step * x.shape[1], x.shape[2])
