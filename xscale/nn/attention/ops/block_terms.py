"""Terms of relative positions in block-sparse attention, computed for a chunk of blocks at a time.

A block of Q queries and n adjacent blocks of b keys have n b + Q - 1 distances. Queries are multiplied with the rows of
these distances, and a strided view shifts the products to keys (the skewing of Huang et al. 2019, section 3.4). Keys
are multiplied a tile at a time, for with all distances of the run most products would belong to no query. So memory
grows with the blocks that are seen. Backward computes the terms of a chunk again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from xscale.nn.attention.ops.block_plan import BlockRun, UnitChunk
from xscale.nn.attention.ops.table_products import TableProducts, TableRows
from xscale.nn.position.distance_tables import DistanceTables

NAMES = tuple(field.name for field in fields(DistanceTables))
KEY_TILE = 32
"""Keys of a tile. Smaller ones have fewer products that belong to no query, (Q - 1) / tile of them, and slower ones."""


@dataclass(frozen=True)
class TermPlaces:
    """Where the rows of the tables stand."""

    first: int
    """Distance key - query of the tables' first row; nearer and farther ones have the first and the last row."""
    first_query: int
    """Position of the first query."""
    queries: int
    """Q, queries of a block."""
    block: int
    """b, keys of a block."""

    def width(self, keys: int) -> int:
        """Return W, distances of a block of queries and so many adjacent keys, and behind them a few that no pair has:
        products with a multiple of 16 columns take 0.7 of the time."""
        width = -(-(self.queries + keys - 1) // 16) * 16
        # Rows at a multiple of 2 KiB share few sets of the cache.
        return width if width % 512 else width + 16


class BlockTerms:
    """Terms of the scores and of the output of one call, and their gradients.

    `tables` are those of NAMES, in float32 at least. Queries have the scale 1 / sqrt(K), and the scores and the terms a
    `power`, 1 or log2(e); gradients are those of scores without it.
    """

    def __init__(
        self,
        places: TermPlaces,
        tables: Sequence[Tensor | None],
        scale: float,
        power: float,
        *,
        folds: bool,
    ) -> None:
        """`folds`: the content bias is added to the queries, not to the scores, since nothing comes between them."""
        self.places = places
        self.scale = scale
        self.power = power
        self.folds = folds
        known = dict(zip(NAMES, tables, strict=True))
        self.bias, self.content_bias, self.position_bias = (
            known[name] for name in ("bias", "content_bias", "position_bias")
        )
        query_rows, value_rows = known["query_rows"], known["value_rows"]
        self.query_rows = None if query_rows is None else TableProducts(query_rows)
        self.value_rows = None if value_rows is None else TableProducts(value_rows)
        self.key_rows: TableProducts | None = None
        if (rows := known["key_rows"]) is not None:
            # By descending distance, so that products of keys shift to queries by a positive stride.
            self.key_rows = TableProducts(rows.flip(1).mul_(scale * power))
        self.sums = {
            name: torch.zeros_like(table)
            for name, table in known.items()
            if table is not None and not name.endswith("_rows")
        }
        self.dtype = next(table.dtype for table in tables if table is not None)
        self._buffers: dict[str, Tensor] = {}
        self._uses: dict[str, tuple[int | None, ...]] = {}

    @property
    def adds_values(self) -> bool:
        return self.value_rows is not None

    @property
    def adds_by_distance(self) -> bool:
        """Whether there are terms of the distance alone, or of a query and the distance."""
        return self.query_rows is not None or self.bias is not None

    def content_queries(self, chunk: UnitChunk, q: Tensor) -> Tensor:
        """Return q [U, Q, K], which has scale and power, with the content bias, if it is folded."""
        if self.content_bias is None or not self.folds:
            return q
        return q + (_of_heads(self.content_bias, chunk) * (self.scale * self.power))[:, None].to(
            q.dtype
        )

    def position_queries(self, chunk: UnitChunk, q: Tensor) -> Tensor:
        """Return q [U, Q, K], which has scale and power, with the position bias, in the dtype of the tables."""
        q = q.to(self.dtype)
        if self.position_bias is None:
            return q
        return q + (_of_heads(self.position_bias, chunk) * (self.scale * self.power))[:, None]

    def add_scores(self, scores: Tensor, chunk: UnitChunk, q: Tensor, k: Tensor) -> None:
        """Add the terms to scores [U, Q, d*b]: q [U, Q, K] of `position_queries`, k [U, d*b, K]."""
        for run in chunk.runs:
            part = scores[..., run.keys(self.places.block)]
            if self.adds_by_distance:
                part.add_(self._by_key(self._by_distance(chunk, run, q), part.shape[2]))
            if self.key_rows is not None:
                rows, tiles = self._key_tiles(chunk, run, k)
                by_key = self._buffer("by key", (*tiles.shape[:2], rows.width))
                self.key_rows.multiply(tiles, rows, by_key)
                self._tiles_of(part).add_(self._by_query(by_key, len(part)))
        if self.content_bias is not None and not self.folds:
            content = _of_heads(self.content_bias, chunk) * (self.scale * self.power)
            scores.add_(content[:, None] @ k.to(self.dtype).mT)

    def add_values(self, mixed: Tensor, chunk: UnitChunk, weights: Tensor) -> None:
        """Add the terms of weights [U, Q, d*b] to `mixed` [U, Q, K]."""
        assert self.value_rows is not None
        for run in chunk.runs:
            by_distance = self._unshifted(weights[..., run.keys(self.places.block)])
            values = self._zeros("values", mixed.shape)
            self.value_rows.add_products(
                by_distance, self._rows(chunk, run, self.value_rows.table), values
            )
            mixed.add_(values)

    def add_weight_gradients(
        self, raised: Tensor, chunk: UnitChunk, weights: Tensor, above: Tensor
    ) -> None:
        """Add the gradients of the weights [U, Q, d*b] through the terms of the output to `raised`, given those of the
        output, `above` [U, Q, K]; and sum the gradients of the rows."""
        assert self.value_rows is not None
        above = above.to(self.dtype)
        for run in chunk.runs:
            keys, rows = run.keys(self.places.block), self._rows(chunk, run, self.value_rows.table)
            by_distance = self._buffer("by distance", (*above.shape[:2], rows.width))
            self.value_rows.multiply(above, rows, by_distance)
            raised[..., keys].add_(self._by_key(by_distance, keys.stop - keys.start))
            self.value_rows.add_row_gradients(self._unshifted(weights[..., keys]), rows, above)

    def add_gradients(
        self, chunk: UnitChunk, dscores: Tensor, q: Tensor, k: Tensor, mixed: Tensor, parts: Tensor
    ) -> None:
        """Add the gradients through the terms of the scores, given those of the scores, `dscores` [U, Q, d*b].

        q and k are those of `add_scores`. `mixed` [U, Q, K] gets the gradients of queries without the scale, and may
        have those of the products with keys; `parts` [U, d*b, K] gets those of keys with the power.
        """
        if self.content_bias is not None:
            self._add_content_gradients(chunk, dscores, k, mixed, parts)
        of_queries = None
        for run in chunk.runs:
            part = dscores[..., run.keys(self.places.block)]
            if self.adds_by_distance:
                by_distance = self._unshifted(part)
                if self.bias is not None:
                    index, count = self._index(chunk, run, self.bias)
                    self.sums["bias"].view(count).index_add_(
                        0, index.flatten(), by_distance.sum(1).flatten()
                    )
                if self.query_rows is not None:
                    rows = self._rows(chunk, run, self.query_rows.table)
                    if of_queries is None:
                        of_queries = self._zeros("of queries", q.shape)
                    self.query_rows.add_products(by_distance, rows, of_queries)
                    self.query_rows.add_row_gradients(by_distance, rows, q)
            if self.key_rows is not None:
                self._add_key_gradients(chunk, run, part, k, parts)
        if of_queries is not None:
            mixed.add_(of_queries)
            if self.position_bias is not None:
                _add_of_heads(self.sums["position_bias"], chunk, of_queries.sum(1))

    def _add_content_gradients(
        self, chunk: UnitChunk, dscores: Tensor, k: Tensor, mixed: Tensor, parts: Tensor
    ) -> None:
        assert self.content_bias is not None
        if self.folds:
            _add_of_heads(self.sums["content_bias"], chunk, mixed.sum(1))
            return
        by_key = dscores.sum(1, keepdim=True).to(self.dtype)  # [U, 1, d*b]
        _add_of_heads(self.sums["content_bias"], chunk, (by_key @ k.to(self.dtype))[:, 0])
        content = _of_heads(self.content_bias, chunk) * (self.scale * self.power)
        parts.add_(by_key.mT * content[:, None])

    def _add_key_gradients(
        self, chunk: UnitChunk, run: BlockRun, part: Tensor, k: Tensor, parts: Tensor
    ) -> None:
        assert self.key_rows is not None
        rows, tiles = self._key_tiles(chunk, run, k)
        by_key = self._zeros("gradients by key", (*tiles.shape[:2], rows.width), tiles.shape[1])
        self._by_query(by_key, len(part)).copy_(self._tiles_of(part))
        of_keys = self._zeros("of keys", tiles.shape)
        self.key_rows.add_products(by_key, rows, of_keys)
        self.key_rows.add_row_gradients(by_key, rows, tiles)
        # [tiles, U, tile, K] -> [U, tiles, tile, K]
        of_tiles = of_keys.view(-1, len(part), *tiles.shape[1:]).transpose(0, 1)
        parts[:, run.keys(self.places.block)].view(of_tiles.shape).add_(of_tiles)

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of the tables in their order."""
        results: dict[str, Tensor | None] = dict.fromkeys(NAMES)
        for name, total in self.sums.items():
            results[name] = total if name == "bias" else total.mul_(self.scale)
        if self.query_rows is not None:
            results["query_rows"] = self.query_rows.gradients().div_(self.power)
        if self.key_rows is not None:
            results["key_rows"] = self.key_rows.gradients().flip(1).mul_(self.scale)
        if self.value_rows is not None:
            results["value_rows"] = self.value_rows.gradients()
        return [results[name] for name in NAMES]

    def _by_distance(self, chunk: UnitChunk, run: BlockRun, q: Tensor) -> Tensor:
        """Return terms of queries and ascending distances, [U, Q, W]."""
        width = self.places.width(run.size * self.places.block)
        by_distance = self._buffer("by distance", (*q.shape[:2], width))
        if self.query_rows is not None:
            self.query_rows.multiply(q, self._rows(chunk, run, self.query_rows.table), by_distance)
        if self.bias is not None:
            index, count = self._index(chunk, run, self.bias)
            bias = self.bias.reshape(count)[index].mul_(self.power)[:, None]  # [U, 1, W]
            if self.query_rows is None:
                by_distance.copy_(bias.expand_as(by_distance))
            else:
                by_distance.add_(bias)
        return by_distance

    def _rows(self, chunk: UnitChunk, run: BlockRun, table: Tensor) -> TableRows:
        """Return the rows of each unit's distances to the run's keys."""
        first = 1 - self.places.queries - self.places.first_query - self.places.first
        width, is_shared = self.places.width(run.size * self.places.block), table.shape[0] == 1
        key = ("queries", run.start, self.places.queries, self.places.block, is_shared)
        if key not in chunk.rows_cache:
            nearest = (
                chunk.columns[:, run.start] * self.places.block - chunk.rows * self.places.queries
            )
            chunk.rows_cache[key] = TableRows.of(
                nearest, torch.zeros_like(chunk.heads) if is_shared else chunk.heads, width
            )
        return chunk.rows_cache[key].shifted(first)

    def _index(self, chunk: UnitChunk, run: BlockRun, bias: Tensor) -> tuple[Tensor, int]:
        """Return flat indices [U, W] of the distances' numbers in a table [H or 1, N], and the table's size."""
        return self._rows(chunk, run, bias).index(bias.shape[1]), bias.numel()

    def _key_tiles(self, chunk: UnitChunk, run: BlockRun, k: Tensor) -> tuple[TableRows, Tensor]:
        """Return the rows, by descending distance, and the keys [tiles * U, tile, K], of the run's tiles."""
        assert self.key_rows is not None
        places, table = self.places, self.key_rows.table
        tile = self._tile
        count, is_shared = run.size * places.block // tile, table.shape[0] == 1
        key = ("keys", run.start, places.queries, places.block, is_shared)
        if key not in chunk.rows_cache:
            starts = torch.arange(count, device=k.device)[:, None] * tile
            farthest = (
                chunk.columns[:, run.start] * places.block + starts - chunk.rows * places.queries
            )  # [tiles, U]
            heads = (torch.zeros_like(chunk.heads) if is_shared else chunk.heads).repeat(count)
            chunk.rows_cache[key] = TableRows.of(-farthest.flatten(), heads, places.width(tile))
        # The farthest distance of a tile is that of its last key to the first query.
        first = places.first + table.shape[1] - 1 + places.first_query - (tile - 1)
        keys = (
            k[:, run.keys(places.block)]
            .to(self.dtype)
            .view(len(k), count, tile, -1)
            .transpose(0, 1)
        )
        tiles = self._buffer("tiles", tuple(keys.shape)).copy_(keys)
        return chunk.rows_cache[key].shifted(first), tiles.flatten(0, 1)

    @property
    def _tile(self) -> int:
        return KEY_TILE if self.places.block % KEY_TILE == 0 else self.places.block

    def _tiles_of(self, part: Tensor) -> Tensor:
        """View [U, Q, n*b] as [tiles, U, Q, tile]."""
        return part.view(*part.shape[:2], -1, self._tile).permute(2, 0, 1, 3)

    def _by_query(self, by_key: Tensor, units: int) -> Tensor:
        """View [tiles * U, tile, W], by key and descending distance, as [tiles, U, Q, tile], by query."""
        _, tile, width = by_key.shape
        size = (by_key.shape[0] // units, units, self.places.queries, tile)
        return by_key.as_strided(size, (units * tile * width, tile * width, 1, width - 1), tile - 1)

    def _by_key(self, by_distance: Tensor, keys: int) -> Tensor:
        """View [U, Q, W], by ascending distance, as [U, Q, n*b], by key."""
        units, queries, width = by_distance.shape
        size = (units, queries, keys)
        return by_distance.as_strided(size, (queries * width, width - 1, 1), queries - 1)

    def _unshifted(self, by_key: Tensor) -> Tensor:
        """Return values of queries and keys [U, Q, n*b] by distance, [U, Q, W], 0 at distances of no key."""
        shape = (*by_key.shape[:2], self.places.width(by_key.shape[2]))
        by_distance = self._zeros("unshifted", shape, by_key.shape[2])
        self._by_key(by_distance, by_key.shape[2]).copy_(by_key)
        return by_distance

    def _buffer(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the buffer of that name: on a CPU new memory costs as much as a pass over it."""
        size, old = torch.Size(shape).numel(), self._buffers.get(name)
        if old is None or old.numel() < size:
            table = next(
                x
                for x in (self.query_rows, self.key_rows, self.value_rows, self.bias)
                if x is not None
            )
            device = table.device if isinstance(table, Tensor) else table.table.device
            old = self._buffers[name] = torch.empty(size, dtype=self.dtype, device=device)
            self._uses.pop(name, None)
        return old[:size].view(shape)

    def _zeros(self, name: str, shape: tuple[int, ...], keys: int | None = None) -> Tensor:
        """Return the buffer of that name with zeros. With a number of `keys`, all calls of this shape and number write
        the same places of it, and it may have the values of the last."""
        buffer, use = self._buffer(name, shape), (*shape, keys)
        if keys is None or self._uses.get(name) != use:
            buffer.zero_()
        self._uses[name] = use
        return buffer


def _of_heads(table: Tensor, chunk: UnitChunk) -> Tensor:
    """Rows [U, K] of a table [H or 1, K] of each unit's head."""
    return table.expand(len(chunk.heads), -1) if table.shape[0] == 1 else table[chunk.heads]


def _add_of_heads(sums: Tensor, chunk: UnitChunk, values: Tensor) -> None:
    """Add values [U, K] to the sums [H or 1, K] of the units' heads."""
    if sums.shape[0] == 1:
        sums.add_(values.sum(0))
    else:
        sums.index_add_(0, chunk.heads, values.to(sums.dtype))
