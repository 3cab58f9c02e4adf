"""Index tensors of a block layout: the units of work of block-sparse attention, in buckets of equal degree.

A unit is one query block of one head with the key blocks that it sees. Units with the same number of key blocks form a
bucket, so that a bucket is a few batched matmuls without padding, and only blocks of the layout are computed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from xscale.nn.attention.ops.table_products import TableRows
from xscale.nn.pattern.grid import PeriodicTokenMask, TokenMask
from xscale.nn.pattern.pattern import Layout

TokenMasks = tuple[tuple[Tensor, TokenMask | None], ...]
"""Layouts [H or 1, rows, columns] with their token masks; a key is seen where any of them shows it."""
PAIRS = 1 << 22
"""Pairs of tokens for which token masks are evaluated at a time."""


@dataclass(frozen=True)
class DegreeBucket:
    """The units that see `degree` key blocks each."""

    heads: Tensor | None
    """[U], head of each unit; None: every head has these units."""
    rows: Tensor
    """[U], query block of each unit, counted from the first row of the layout."""
    columns: Tensor
    """[U, degree], key blocks, ascending."""
    tiles: Tensor | None = None
    """[U, degree], index of each block's mask tile in the plan; tile 0 masks nothing. None: no block is masked."""

    @property
    def degree(self) -> int:
        return self.columns.shape[1]


@dataclass(frozen=True)
class BlockRun:
    """Key blocks of the units of a chunk that are adjacent in the sequence for every unit."""

    start: int
    """First of the d blocks."""
    stop: int

    @property
    def size(self) -> int:
        """n, blocks."""
        return self.stop - self.start

    def keys(self, block: int) -> slice:
        """Return the run's keys among the d * block keys of a unit."""
        return slice(self.start * block, self.stop * block)


@dataclass(frozen=True)
class UnitChunk:
    """The units of a bucket that are computed at a time."""

    batch: Tensor
    """[U]."""
    heads: Tensor
    """[U]."""
    rows: Tensor
    """[U]."""
    columns: Tensor
    """[U, d]."""
    units: Tensor
    """[U], flat index among the B*H*rows query blocks."""
    keys: Tensor
    """[U * d], flat indices among the B*G*columns key blocks."""
    tiles: tuple[tuple[int, Tensor], ...]
    """Which of the d blocks are masked in part, and their tile indices [1 or U]."""
    ends: bool
    """Whether any unit sees the last key block of the sequence."""
    rows_cache: dict[tuple[str, int, int, int, bool], TableRows] = field(
        default_factory=dict, compare=False
    )
    """Rows of tables by distance that the units read."""

    @cached_property
    def runs(self) -> tuple[BlockRun, ...]:
        """Runs of adjacent key blocks, in order: together all d."""
        adjacent = (self.columns[:, 1:] - self.columns[:, :-1] == 1).all(0).tolist()
        starts = [0, *(slot + 1 for slot, together in enumerate(adjacent) if not together)]
        stops = [*starts[1:], self.columns.shape[1]]
        return tuple(BlockRun(start, stop) for start, stop in zip(starts, stops, strict=True))


@dataclass(frozen=True)
class BlockPlan:
    """All units of a layout."""

    rows: int
    """Query blocks."""
    columns: int
    """Key blocks."""
    buckets: tuple[DegreeBucket, ...]
    """Buckets of degree >= 1; query blocks that see nothing are in none."""
    full: bool
    """Whether every query block is in a bucket."""
    tiles: Tensor | None = None
    """[P, Q, b], the distinct mask tiles: 0 where a query sees a key, -inf where it does not."""
    chunk_cache: dict[tuple[int, int, int, int], tuple[UnitChunk, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """The chunks of the most recent shapes."""

    def distances(self, queries: int, block: int) -> range:
        """Return the distances key - query that occur in blocks of so many queries and keys; the first query is 0."""
        nearest = [
            bucket.columns * block - bucket.rows[:, None] * queries for bucket in self.buckets
        ]
        first = min((int(x.min()) for x in nearest), default=0)
        last = max((int(x.max()) for x in nearest), default=0)
        return range(first - queries + 1, last + block)

    def chunks(self, batch: int, heads: int, kv_heads: int, scores: int) -> tuple[UnitChunk, ...]:
        """Split the units of each bucket into chunks of at most `scores` blocks of scores; cached for each shape."""
        key = (batch, heads, kv_heads, scores)
        if key not in self.chunk_cache:
            if len(self.chunk_cache) >= 2:
                del self.chunk_cache[next(iter(self.chunk_cache))]
            self.chunk_cache[key] = tuple(self._chunks(*key))
        return self.chunk_cache[key]

    def _chunks(self, batch: int, heads: int, kv_heads: int, scores: int) -> Iterator[UnitChunk]:
        for bucket in self.buckets:
            repeats = heads if bucket.heads is None else 1
            units = batch * repeats * len(bucket.rows)
            size = max(1, scores // bucket.degree)
            # Chunks of nearly the same size, so that the last one is not small.
            size = -(-units // -(-units // size))
            for first in range(0, units, size):
                index = torch.arange(first, min(units, first + size), device=bucket.rows.device)
                yield self._chunk(bucket, index, (heads, repeats, kv_heads))

    def _chunk(self, bucket: DegreeBucket, index: Tensor, shape: tuple[int, int, int]) -> UnitChunk:
        heads, repeats, kv_heads = shape
        unit, outer = index % len(bucket.rows), index // len(bucket.rows)
        batch = outer // repeats
        head = outer % repeats if bucket.heads is None else bucket.heads[unit]
        rows, columns = bucket.rows[unit], bucket.columns[unit]
        kv_head = batch * kv_heads + head // (heads // kv_heads)
        return UnitChunk(
            batch=batch,
            heads=head,
            rows=rows,
            columns=columns,
            units=(batch * heads + head) * self.rows + rows,
            keys=(kv_head[:, None] * self.columns + columns).flatten(),
            tiles=() if bucket.tiles is None else tuple(_masking_columns(bucket.tiles[unit])),
            ends=bool((columns[:, -1] == self.columns - 1).any()),
        )


def _masking_columns(tiles: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the columns of tiles [U, d] that mask anything; a tile that all units share is given once."""
    for index, column in enumerate(tiles.unbind(1)):
        if bool(column.any()):
            yield index, column[:1] if bool((column == column[0]).all()) else column


def plan_blocks(
    layout: Layout,
    device: torch.device,
    token_masks: TokenMasks = (),
    block: int = 0,
    first_row: int = 0,
) -> BlockPlan:
    """Plan a layout [H or 1, rows, columns]; `token_masks` say what is seen inside its blocks of `block` tokens."""
    heads, rows, columns = layout.shape
    degrees = layout.sum(-1).reshape(-1)  # [H * rows]
    line, column = np.divmod(np.flatnonzero(layout.reshape(-1)), columns)
    starts = np.concatenate(([0], np.cumsum(degrees)))
    assert len(column) == starts[-1]
    known: dict[bytes, int] = {bytes(-(-block * block // 8)): 0}
    all_tiles = None
    if token_masks:
        index = torch.from_numpy(np.stack((line // rows, line % rows, column)))
        all_tiles = _tiles(index[0], index[1], index[2], token_masks, block, first_row, known)
    buckets = []
    for degree in np.unique(degrees):
        if degree == 0:
            continue
        units = np.flatnonzero(degrees == degree)  # [U]
        places = starts[units][:, None] + np.arange(degree)  # [U, degree]
        head, row, at = (torch.from_numpy(x) for x in (units // rows, units % rows, column[places]))
        tiles = None if all_tiles is None else all_tiles[torch.from_numpy(places)].to(device)
        shared = None if heads == 1 else head.to(device)
        buckets.append(
            DegreeBucket(heads=shared, rows=row.to(device), columns=at.to(device), tiles=tiles)
        )
    full = bool((degrees > 0).all())
    return BlockPlan(
        rows,
        columns,
        tuple(buckets),
        full,
        _unpack_tiles(known, block).to(device) if token_masks else None,
    )


def _tiles(
    head: Tensor,
    row: Tensor,
    column: Tensor,
    token_masks: TokenMasks,
    block: int,
    first_row: int,
    known: dict[bytes, int],
) -> Tensor:
    """Tile index of each block [U * d]; `known` maps the packed bits of a tile to its index and is extended."""
    seen = torch.stack(
        [layout[head if layout.shape[0] > 1 else 0, row, column] for layout, _ in token_masks]
    )  # [W, U * d]
    row = first_row + row
    distinct, inverse = _distinct_blocks(row, column, seen, token_masks, block)
    tiles = torch.zeros(len(distinct), dtype=torch.int64)
    inside = torch.arange(block)
    size = max(1, PAIRS // block**2)
    for first in range(0, len(distinct), size):
        at = distinct[first : first + size]
        i = (row[at][:, None] * block + inside)[:, :, None]
        j = (column[at][:, None] * block + inside)[:, None, :]
        shown = torch.zeros(len(at), block, block, dtype=torch.bool)
        for in_layout, (_, token_mask) in zip(seen[:, at, None, None], token_masks, strict=True):
            shown |= in_layout if token_mask is None else in_layout & token_mask(i, j)
        bits = np.packbits(~shown.flatten(1).numpy(), axis=1)
        numbers = [known.setdefault(line.tobytes(), len(known)) for line in bits]
        tiles[first : first + len(at)] = torch.tensor(numbers)
    return tiles[inverse]


def _distinct_blocks(
    row: Tensor, column: Tensor, seen: Tensor, token_masks: TokenMasks, block: int
) -> tuple[Tensor, Tensor]:
    """Blocks [P] whose tiles may differ (as indices), and for each block [U * d] the index of its equal among them."""
    masks = [token_mask for _, token_mask in token_masks if token_mask is not None]
    periods = [
        token_mask.period for token_mask in masks if isinstance(token_mask, PeriodicTokenMask)
    ]
    if len(periods) < len(masks):
        all_blocks = torch.arange(len(row))
        return all_blocks, all_blocks
    period = math.lcm(block, *periods) // block
    # Blocks have equal tiles if they have the same distance, the same phase in the period and the same layouts.
    key = (row % period) * (2 * int(column.max()) + 2 * int(row.max()) + 2) + (
        column - row + int(row.max())
    )
    for in_layout in seen:
        key = 2 * key + in_layout
    _, first, inverse = np.unique(key.numpy(), return_index=True, return_inverse=True)
    return torch.from_numpy(first), torch.from_numpy(inverse.reshape(-1))


def _unpack_tiles(known: dict[bytes, int], block: int) -> Tensor:
    """Unpack the bits of the mask tiles: [P, b, b], -inf where a key is masked, else 0."""
    bits = np.frombuffer(b"".join(known), dtype=np.uint8).reshape(len(known), -1)
    hidden = np.unpackbits(bits, axis=1, count=block * block).reshape(-1, block, block)
    return torch.zeros(hidden.shape).masked_fill_(torch.from_numpy(hidden).bool(), float("-inf"))
