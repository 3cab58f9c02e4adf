"""Distances of the keys that a block of queries sees, and strided views from distances to keys."""

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from xscale.nn.attention.ops.mask import AttentionMask


@dataclass(frozen=True)
class RelativeSpan:
    """The keys of one block of queries. Near keys are told apart by their distance, and stand between those before the
    reach of the tables, which have none of their terms, and those beyond it, which have their last row."""

    start: int
    """First query."""
    stop: int
    begin: int
    """First key."""
    near: int
    """First near key."""
    far: int
    """First key beyond the reach."""
    end: int
    """Behind the last key: a causal block needs no later ones."""
    table: int
    """Index in the tables of the distance of the first near key to the last query."""

    @property
    def queries(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def keys(self) -> slice:
        return slice(self.begin, self.end)

    @property
    def rows(self) -> int:
        """n, queries."""
        return self.stop - self.start

    @property
    def columns(self) -> int:
        """c, near keys."""
        return self.far - self.near

    @property
    def distances(self) -> slice:
        """The tables' rows for near keys, n + c - 1."""
        return slice(self.table, self.table + self.rows + self.columns - 1)

    def within(self, keys: slice) -> "RelativeSpan":
        """Return the span of the same queries with those of its keys that are in the slice, maybe none."""
        begin, near, far, end = (
            min(max(key, keys.start), keys.stop)
            for key in (self.begin, self.near, self.far, self.end)
        )
        return replace(
            self, begin=begin, near=near, far=far, end=end, table=self.table + near - self.near
        )


@dataclass(frozen=True)
class KeyTile:
    """A block of keys and the distances to them at which there are queries."""

    keys: slice
    before: slice
    """Columns, by descending distance, of distances before the reach, which have no terms."""
    within: slice
    """Columns of distances within the reach."""
    beyond: slice
    """Columns of distances beyond the reach, which have the last row of the table."""
    read: tuple[np.ndarray, np.ndarray]
    """Each key's first column with a query and the one after its last, [keys, 1]: a key has adjacent distances."""

    def read_in_part(self, dtype: torch.dtype) -> list[tuple[slice, Tensor]]:
        """Return the columns at which only some of the keys have a query, with factors [keys, columns]: 1 for those."""
        first, stop = self.read
        columns = slice(self.beyond.start, self.before.stop)
        left = slice(columns.start, min(int(first.max()), columns.stop))
        right = slice(max(int(stop.min()), left.stop), columns.stop)
        return [
            (side, torch.from_numpy((first <= column) & (column < stop)).to(dtype))
            for side, column in ((side, np.arange(side.start, side.stop)) for side in (left, right))
            if len(column)
        ]


@dataclass(frozen=True)
class RelativeSpans:
    """Queries, keys and distances of an attention whose last query is the last key."""

    queries: int
    keys: int
    causal: bool
    low: int
    """Keys at this distance, key - query, and before have one row of the tables."""
    high: int
    """Keys at this distance and after have one row."""
    block: int
    """Queries of a block."""

    @classmethod
    def of(cls, mask: AttentionMask, reach: int | None, block: int) -> "RelativeSpans":
        """Describe the mask's pairs; keys at a distance of `reach` or more have one row, None: each has its own."""
        low, high = -mask.keys, 1 if mask.causal else mask.queries
        if reach is not None:
            low, high = max(low, -reach), min(high, reach)
        return cls(mask.queries, mask.keys, mask.causal, low, high, block)

    @property
    def is_clipped(self) -> bool:
        """Whether there are keys before the reach."""
        return self.low > -self.keys

    @property
    def rows_within(self) -> slice:
        """The tables' rows of distances within the reach; those after it are equal, and those before it are 0."""
        return slice(self.block + 1, self.high - self.low + self.block)

    @property
    def tile_columns(self) -> int:
        """Near keys of a block that is not at an end of the sequence."""
        return self.high + self.block - 2 - self.low

    def tile(self, span: RelativeSpan) -> tuple[slice, slice]:
        """Return the queries and near keys of the span as slices of a tile [block, tile_columns]."""
        first = span.near - (span.start + self.keys - self.queries) - self.low - 1
        return slice(span.rows), slice(first, first + span.columns)

    def turned(self, by_key: Tensor, span: RelativeSpan, first_key: int) -> Tensor:
        """View values of keys from `first_key` on and all distances, descending, [keys, N], as those of the queries and
        near keys [n, c] of a span."""
        row, column = by_key.stride()
        first = (span.near - first_key) * row + self.first_column(span)
        return by_key.as_strided((span.rows, span.columns), (column, row - column), first)

    def key_tiles(self, keys: slice) -> tuple[KeyTile, ...]:
        """Return tiles of a block of keys each; keys that are near to no query are in none."""
        return _key_tiles(self, keys.start, keys.stop)

    def first_column(self, span: RelativeSpan) -> int:
        """Return the column, by descending distance, of the first near key's distance to the first query."""
        return self.high - self.low + 2 * self.block - span.table - span.rows

    def distances(self, device: torch.device) -> Tensor:
        """Return the distances of the tables' rows, [N]; a block more than are told apart on either side."""
        distances = torch.arange(self.low - self.block, self.high + self.block, device=device)
        first, last = (
            max(1 - self.keys, self.low),
            min(0 if self.causal else self.queries - 1, self.high),
        )
        return distances.clamp(first, last)

    def query_blocks(self) -> tuple[RelativeSpan, ...]:
        """Return the blocks of queries in order, each with all keys that it needs."""
        return _query_blocks(self)

    def key_chunks(self, keys: int) -> list[tuple[slice, list[RelativeSpan]]]:
        """Return slices of at most so many keys, with the blocks of queries that see any of them."""
        return _key_chunks(self, keys)


@functools.lru_cache(maxsize=16)
def _query_blocks(spans: RelativeSpans) -> tuple[RelativeSpan, ...]:
    offset, blocks = spans.keys - spans.queries, []
    for start in range(0, spans.queries, spans.block):
        stop = min(start + spans.block, spans.queries)
        first, last = start + offset, stop - 1 + offset
        end = last + 1 if spans.causal else spans.keys
        near = max(first + spans.low + 1, 0)
        far = min(max(last + spans.high, near), end)
        blocks.append(
            RelativeSpan(start, stop, 0, near, far, end, near - last - spans.low + spans.block)
        )
    return tuple(blocks)


@functools.lru_cache(maxsize=32)
def _key_chunks(spans: RelativeSpans, size: int) -> list[tuple[slice, list[RelativeSpan]]]:
    chunks = [slice(begin, min(begin + size, spans.keys)) for begin in range(0, spans.keys, size)]
    return [
        (keys, [span.within(keys) for span in spans.query_blocks() if span.end > keys.start])
        for keys in chunks
    ]


@functools.lru_cache(maxsize=64)
def _key_tiles(spans: RelativeSpans, begin: int, end: int) -> tuple[KeyTile, ...]:
    distances, tiles = spans.high - spans.low + 2 * spans.block, []
    for start in range(begin, end, spans.block):
        keys = slice(start, min(start + spans.block, end))
        near = [
            block
            for block in spans.query_blocks()
            if block.near < keys.stop and block.far > keys.start
        ]
        if blocks := [span for span in (block.within(keys) for block in near) if span.columns]:
            first, last = (
                min(span.table for span in blocks),
                max(span.distances.stop for span in blocks),
            )
            columns = slice(distances - last, distances - first)
            beyond = min(max(spans.block, columns.start), columns.stop)
            before = min(max(distances - spans.block - 1, beyond), columns.stop)
            parts = slice(before, columns.stop), slice(beyond, before), slice(columns.start, beyond)
            tiles.append(KeyTile(keys, *parts, _read_columns(spans, keys, columns, blocks)))
    return tuple(tiles)


def _read_columns(
    spans: RelativeSpans, keys: slice, columns: slice, blocks: list[RelativeSpan]
) -> tuple[np.ndarray, np.ndarray]:
    first = np.full((keys.stop - keys.start, 1), columns.stop)
    stop = np.full_like(first, columns.start)
    for block in blocks:
        rows = slice(block.near - keys.start, block.far - keys.start)
        read = spans.first_column(block) - np.arange(block.columns)[:, None]
        np.minimum(first[rows], read, out=first[rows])
        np.maximum(stop[rows], read + block.rows, out=stop[rows])
    return first, stop


class SkewedScores:
    """Scores of a block of queries and its keys in a buffer that a second view reads by distance.

    A row of the second view is one number longer, so that it begins one distance earlier for each query (the skewing of
    Huang et al. 2019, section 3.4). A product by distance is written where the scores are, and gradients of scores are
    read by distance, without a copy.
    """

    def __init__(self, buffer: Tensor, span: RelativeSpan, rows_within: slice) -> None:
        """View a buffer of at least `size` numbers; they are not initialised."""
        rows = span.rows
        columns = span.columns
        keys = span.end - span.begin
        self.margin, self.stride = rows - 1, self.row_stride(span)
        self._flat, self._first_near = buffer, self.margin + span.near - span.begin
        near, far = span.near - span.begin, span.far - span.begin
        self.scores = buffer.as_strided((rows, keys), (self.stride, 1), self.margin)
        """[n, keys]."""
        self.before = self.scores[:, :near]
        self.near = self.scores[:, near:far]
        self.far = self.scores[:, far:]
        """[n, before], [n, c] and [n, beyond]: keys before the reach, near ones, and those beyond the reach."""
        distances = (rows, rows + columns - 1)
        self.by_distance = buffer.as_strided(
            distances, (self.stride + 1, 1), self._first_near - self.margin
        )
        """[n, n + c - 1], ascending; what it holds beside `near` belongs to no pair, or to other keys."""
        first, stop = (
            min(max(row - span.table, 0), distances[1])
            for row in (rows_within.start, rows_within.stop)
        )
        self.within, self.beyond = self.by_distance[:, first:stop], self.by_distance[:, stop:]
        """The columns of `by_distance` within and beyond the reach of the tables."""
        self.distances = slice(span.table + first, span.table + stop)
        """The tables' rows within the reach."""

    @staticmethod
    def row_stride(span: RelativeSpan) -> int:
        """Return the numbers from a query's row to the next: rows of neither view overlap, nor margins of near keys."""
        return unaligned(max(span.end - span.begin, span.rows + span.columns - 1))

    @classmethod
    def size(cls, span: RelativeSpan) -> int:
        """Return the numbers that the buffer of a block needs."""
        return span.rows * cls.row_stride(span) + 2 * span.rows

    def multiply(self, x: Tensor, table: Tensor, start: Tensor, far: Tensor) -> None:
        """Write products of x [n, K] with the table's rows over `start` [n, 1]; `far` [n, 1] has those of the last."""
        self.by_distance.copy_(start.expand_as(self.by_distance))
        self.within.addmm_(x, table[self.distances].T)
        self.beyond.add_(far)

    def clear_others(self) -> None:
        """Set what `by_distance` shows beside the near keys to 0, so that a product reads these alone. This destroys
        values of other keys."""
        for first in (self._first_near - self.margin, self._first_near + self.near.shape[1]):
            self._flat.as_strided((len(self.near), self.margin), (self.stride, 1), first).zero_()


def unaligned(columns: int) -> int:
    """Return a row stride for so many columns: neither it nor its successor is a multiple of 32 numbers. Rows at a
    multiple of 4 KiB share few sets of the cache, and products with them take up to 1.3 times as long."""
    return (columns | 31) + 16


def shifted(by_distance: Tensor, columns: int) -> Tensor:
    """View values of queries and ascending distances [n, n + c - 1], contiguous, as of queries and keys [n, c]."""
    rows, distances = by_distance.shape
    return by_distance.as_strided(
        (rows, columns), (distances - 1, 1), by_distance.storage_offset() + rows - 1
    )


def add_by_columns(sums: Tensor, x: Tensor, identity: Tensor) -> None:
    """Add x [n, c] to the sums, where x is contiguous by column and the sums by row.

    An elementwise sum would read one number of each cache line at a time. A product with a small identity matrix reads
    whole lines, as the BLAS copies what it multiplies, and takes a third of the time; each number of it is exact.
    """
    size = len(identity)
    rows = len(x) // size
    if rows * size < len(x):
        sums.add_(x)
    else:
        sums.view(rows, size, -1).baddbmm_(identity.expand(rows, -1, -1), x.view(rows, size, -1))
