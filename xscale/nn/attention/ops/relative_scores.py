"""Scores and gradients of one block of queries with relative positions, in buffers that all blocks share."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from xscale.nn.attention.ops.relative_spans import (
    KeyTile,
    RelativeSpan,
    RelativeSpans,
    SkewedScores,
    add_by_columns,
    shifted,
    unaligned,
)

TURNED = 16
"""Rows of a block that a product turns at once."""
LOG2E = math.log2(math.e)


class HeadInputs:
    """Tensors of one head of one sequence; queries, and what else a score is linear in, are scaled to base 2."""

    def __init__(self, spans: RelativeSpans, inputs: Sequence[Any], b: int, h: int) -> None:
        q, k, v, *rows = inputs
        group = h // (q.shape[1] // k.shape[1])
        query_rows, key_rows, bias, value_rows, content_bias, position_bias = (
            select_head(table, h) for table in rows
        )
        factor = q.shape[-1] ** -0.5 * LOG2E
        self.k, self.v = k[b, group].contiguous(), v[b, group].contiguous()  # [S, K]
        self.q = _scaled(q[b, h], content_bias, factor)  # [T, K]
        self.query_rows, self.value_rows = query_rows, value_rows  # [N, K]
        self.far_queries, self.far_keys = q.new_zeros(len(self.q), 1), q.new_zeros(len(self.k))
        """[T, 1] and [S]: terms of each query, and of each key, where the key is beyond the reach."""
        if query_rows is not None:
            self.position_q = _scaled(q[b, h], position_bias, factor)  # [T, K]
            self.far_terms = (self.position_q @ query_rows[-1])[:, None]  # [T, 1]
            self.far_queries += self.far_terms
        self.key_rows: Tensor | None = None
        """[N, K], by descending distance."""
        if key_rows is not None:
            self.key_rows = key_rows.flip(0).mul_(factor)
            self.far_keys += self.k @ self.key_rows[0]
        self.tile: Tensor | None = None
        """[block, tile_columns], biases of a block's queries and near keys."""
        if bias is not None:
            scaled, columns = bias * LOG2E, spans.tile_columns
            by_distance = scaled[2 : columns + spans.block + 1].expand(spans.block, -1).contiguous()
            self.tile = shifted(by_distance, columns)
            self.far_queries += scaled[-1]


def _scaled(q: Tensor, bias: Tensor | None, factor: float) -> Tensor:
    return q * factor if bias is None else (q + bias).mul_(factor)


class HeadGradients:
    """Views of the gradients of one head."""

    def __init__(
        self, spans: RelativeSpans, q: Tensor, k: Tensor, v: Tensor, *rows: Tensor | None
    ) -> None:
        self.q, self.k, self.v = q, k, v
        (
            self.query_rows,
            self.key_rows,
            self.bias,
            self.value_rows,
            self.content_bias,
            self.position_bias,
        ) = rows
        if self.bias is not None:
            columns = spans.tile_columns
            self._by_distance = self.bias.new_zeros(spans.block, columns + spans.block - 1)
            self.tile = shifted(self._by_distance, columns)
        self.position_q = torch.zeros_like(q)
        """[T, K], gradients of queries through the terms of distances."""
        self.far_queries, self.far_terms, self.far_weights, self.far_keys = (
            q.new_zeros(len(x)) for x in (q, q, q, k)
        )
        """[T], [T], [T] and [S]: sums beyond the reach of the gradients of scores, without the near keys and of these,
        of weights, and of the gradients of scores again."""

    def finish(self, head: HeadInputs, above: Tensor) -> None:
        """Add what is summed over all blocks of the head, given the gradients of its output, [T, K]."""
        if self.bias is not None:
            self.bias[2 : self._by_distance.shape[1] + 2].add_(self._by_distance.sum(0))
            self.bias[-1].add_(self.far_queries.sum())
        if self.value_rows is not None:
            self.value_rows[-1].addmv_(above.T, self.far_weights)
        if head.key_rows is not None:
            assert self.key_rows is not None
            self.k.addr_(self.far_keys, head.key_rows[0])
            self.key_rows[-1].addmv_(head.k.T, self.far_keys)
        if self.content_bias is not None:
            self.content_bias.add_(self.q.sum(0))
        if head.query_rows is not None:
            assert self.query_rows is not None
            far = self.far_queries + self.far_terms
            self.position_q.addr_(far, head.query_rows[-1])
            self.query_rows[-1].addmv_(head.position_q.T, far)
            if self.position_bias is not None:
                self.position_bias.add_(self.position_q.sum(0))
            self.q.add_(self.position_q)


class BlockScores:
    """Computes scores and gradients of one block of queries of one head, in buffers that all blocks share."""

    def __init__(
        self,
        spans: RelativeSpans,
        documents: tuple[Tensor | None, Tensor | None],
        q: Tensor,
        keys: int,
    ) -> None:
        self.spans, self.documents, self.q = spans, documents, q
        self.chunks = spans.key_chunks(keys)
        """So many keys at a time, and the blocks of queries that see any of them."""
        self.size = max(SkewedScores.size(span) for _, blocks in self.chunks for span in blocks)
        self.buffers: dict[str, Tensor] = {}
        self.views: dict[tuple[str, RelativeSpan], SkewedScores] = {}
        self.identity = torch.eye(TURNED, dtype=q.dtype)
        self.future = q.new_full((spans.block, spans.block), float("-inf")).triu_(1)

    def buffer(self, name: str, rows: int, columns: int) -> Tensor:
        """Return the buffer of that name: on a CPU new memory costs as much as a pass over it."""
        if name not in self.buffers or self.buffers[name].numel() < rows * columns:
            self.buffers[name] = self.q.new_empty(rows * columns)
        return self.buffers[name][: rows * columns].view(rows, columns)

    def multiply_keys(self, head: HeadInputs, keys: slice) -> None:
        """Multiply keys with the rows of their terms."""
        if head.key_rows is None:
            return
        self.first_key, distances = keys.start, len(head.key_rows)
        self.by_key = self.buffer("by key", keys.stop - keys.start, unaligned(distances))[
            :, :distances
        ]
        """[keys, N], terms by descending distance and then their gradients, where a query is at the distance."""
        for tile in self.spans.key_tiles(keys):
            torch.mm(
                head.k[tile.keys],
                head.key_rows[tile.within].T,
                out=self._of_tile(tile, tile.within),
            )
            self._of_tile(tile, tile.before).zero_()
            beyond = self._of_tile(tile, tile.beyond)
            beyond.copy_(head.far_keys[tile.keys, None].expand_as(beyond))

    def _of_tile(self, tile: KeyTile, distances: slice) -> Tensor:
        return self.by_key[
            tile.keys.start - self.first_key : tile.keys.stop - self.first_key, distances
        ]

    def add_products_of_keys(self, slopes: HeadGradients, head: HeadInputs, keys: slice) -> None:
        """Add the gradients of what `multiply_keys` has multiplied."""
        if head.key_rows is None:
            return
        assert slopes.key_rows is not None
        gradient = torch.zeros_like(head.key_rows)
        for tile in self.spans.key_tiles(keys):
            for distances, read in tile.read_in_part(self.q.dtype):
                self._of_tile(tile, distances).mul_(read)
            by_key = self._of_tile(tile, tile.within)
            slopes.k[tile.keys].addmm_(by_key, head.key_rows[tile.within])
            gradient[tile.within].addmm_(by_key.T, head.k[tile.keys])
            slopes.far_keys[tile.keys].add_(self._of_tile(tile, tile.beyond).sum(1))
        slopes.key_rows.add_(gradient.flip(0))

    def skewed(self, name: str, span: RelativeSpan) -> SkewedScores:
        """View the buffer of that name as values of the span's queries and keys."""
        if (name, span) not in self.views:
            self.views[name, span] = SkewedScores(
                self.buffer(name, 1, self.size)[0], span, self.spans.rows_within
            )
        return self.views[name, span]

    def scores(self, head: HeadInputs, span: RelativeSpan, b: int, start: Tensor) -> SkewedScores:
        """Return the base-2 scores of a block of queries over `start` [n, 1]; -inf where a key is not seen."""
        block = self.skewed("scores", span)
        self._write_terms(block, head, span, start)
        block.scores.addmm_(head.q[span.queries], head.k[span.keys].T)
        first = span.start + self.spans.keys - self.spans.queries
        if self.spans.causal and span.end > first:
            seen = max(first, span.begin)
            block.scores[:, seen - span.begin :].add_(
                self.future[: span.rows, seen - first : span.end - first]
            )
        queries, keys = self.documents
        if queries is not None and keys is not None:
            block.scores.masked_fill_(
                queries[b, span.queries, None] != keys[b, None, span.keys], float("-inf")
            )
        return block

    def _write_terms(
        self, block: SkewedScores, head: HeadInputs, span: RelativeSpan, start: Tensor
    ) -> None:
        """Write what is added to the products of queries and keys."""
        tile = None if head.tile is None or not span.columns else head.tile[self.spans.tile(span)]
        if head.query_rows is not None and span.columns:
            block.multiply(
                head.position_q[span.queries], head.query_rows, start, head.far_terms[span.queries]
            )
        else:
            block.near.copy_(start.expand_as(block.near))
        # The product by distance has overwritten these.
        if span.begin < span.near:
            block.before.copy_(start.expand_as(block.before))
        if span.far < span.end:
            torch.add(
                head.far_queries[span.queries] + start,
                head.far_keys[span.far : span.end],
                out=block.far,
            )
        if head.key_rows is not None and span.columns:
            add_by_columns(
                block.near, self.spans.turned(self.by_key, span, self.first_key), self.identity
            )
        if tile is not None:
            block.near.add_(tile)

    def add_value_rows(
        self, mixed: Tensor, weights: SkewedScores, table: Tensor, span: RelativeSpan
    ) -> None:
        """Add the weights' sum of the table's rows to `mixed` [n, K]; destroys the weights."""
        if span.far < span.end:
            mixed.addr_(weights.far.sum(1), table[-1])
        if span.columns:
            weights.clear_others()
            mixed.addmm_(weights.within, table[weights.distances]).addr_(
                weights.beyond.sum(1), table[-1]
            )

    def add_gradients(
        self,
        slopes: HeadGradients,
        head: HeadInputs,
        span: RelativeSpan,
        weights: SkewedScores,
        above: Tensor,
        inner: Tensor,
    ) -> None:
        """Add the gradients of a chunk, given those of the block's output, `above` [n, K], and their negative products
        with the output, `inner` [n, 1]; destroys the weights."""
        slopes.v[span.keys].addmm_(weights.scores.T, above)
        raised, v = self.skewed("raised", span), head.v[span.keys]
        if head.value_rows is None:
            raised.scores.copy_(inner.expand_as(raised.scores))
        else:
            far = above @ head.value_rows[-1, :, None]
            if span.columns:
                raised.multiply(above, head.value_rows, inner, far)
            raised.before.copy_(inner.expand_as(raised.before))
            raised.far.copy_((inner + far).expand_as(raised.far))
        dscores = raised.scores.addmm_(above, v.T).mul_(weights.scores)  # [n, keys]
        queries, keys = head.q[span.queries], head.k[span.keys]
        slopes.q[span.queries].addmm_(dscores, keys)
        slopes.k[span.keys].addmm_(dscores.T, queries)
        if span.far < span.end:
            if slopes.value_rows is not None:
                slopes.far_weights[span.queries].add_(weights.far.sum(1))
            if head.query_rows is not None or head.tile is not None:
                slopes.far_queries[span.queries].add_(raised.far.sum(1))
            if head.key_rows is not None:
                slopes.far_keys[span.far : span.end].add_(raised.far.sum(0))
        if not span.columns:
            return
        if head.key_rows is not None:
            # Gradients of the terms of keys take the terms' place.
            self.spans.turned(self.by_key, span, self.first_key).copy_(raised.near)
        if head.tile is not None:
            slopes.tile[self.spans.tile(span)].add_(raised.near)
        if slopes.value_rows is not None:
            weights.clear_others()
            slopes.value_rows[weights.distances].addmm_(weights.within.T, above)
            slopes.far_weights[span.queries].add_(weights.beyond.sum(1))
        if head.query_rows is not None:
            assert slopes.query_rows is not None
            raised.clear_others()
            slopes.query_rows[raised.distances].addmm_(
                raised.within.T, head.position_q[span.queries]
            )
            slopes.position_q[span.queries].addmm_(raised.within, head.query_rows[raised.distances])
            slopes.far_terms[span.queries].add_(raised.beyond.sum(1))


def select_head(x: Tensor | None, head: int) -> Tensor | None:
    """Return the head's part of [H or 1, ...]."""
    return None if x is None else x[head if x.shape[0] > 1 else 0]
