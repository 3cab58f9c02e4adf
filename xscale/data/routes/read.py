"""Reads a file of routes, which is mapped, and finds the routes of tokens by the text that they stand in."""

import hashlib
import mmap
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xscale.core.errors import ConfigError
from xscale.data.routes.header import RECORD_AGAIN, RouteChunk, RouteHeader, read_header

Array = NDArray[Any]
CACHED_CHUNKS = 8
"""Chunks whose routes stay decompressed."""
PREFIXES = (1, 2, 4, 8, 16)
"""Lengths of beginnings by which sequences are found of which a sample has the first tokens only."""


@dataclass(frozen=True)
class _Stored:
    """A sequence of the file."""

    chunk: int
    first: int
    """Its first token in the chunk."""
    ids: Array
    sample: int
    start: int


class RouteFile:
    """The routes of a file, by text. ConfigError, at `key`, where the file cannot be read or does not have them."""

    def __init__(self, path: Path, key: str = "moe.replay.file") -> None:
        self.path, self.key = path, key
        self._content = self._map()
        self.header: RouteHeader = read_header(self._content, str(path), key)
        self._texts: dict[bytes, list[_Stored]] = {}
        self._beginnings: dict[bytes, list[_Stored]] = {}
        self._routes: OrderedDict[int, tuple[Array, Array | None]] = OrderedDict()
        for number, chunk in enumerate(self.header.chunks):
            self._index(number, chunk)

    def _map(self) -> Any:
        try:
            with self.path.open("rb") as file:
                if not self.path.stat().st_size:
                    return b""
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            what = f"{self.path} cannot be read: {error.strerror or error}"
            raise ConfigError(self.key, what, "Give a file that --record-routes wrote.") from None

    @property
    def content(self) -> Any:
        """The bytes of the file."""
        return self._content

    def _decompress(self, number: int, offset: int, size: int, wanted: int) -> bytes:
        try:
            content = zlib.decompress(bytes(self._content[offset : offset + size]))
        except zlib.error:
            content = b""
        if len(content) != wanted:
            what = f"chunk {number} of {self.path} is damaged"
            raise ConfigError(self.key, what, RECORD_AGAIN)
        return content

    def _index(self, number: int, chunk: RouteChunk) -> None:
        kind = np.dtype(self.header.ids)
        wanted = 24 * chunk.sequences + kind.itemsize * chunk.tokens
        text = self._decompress(number, chunk.offset, chunk.text_bytes, wanted)
        numbers = np.frombuffer(text, "<i8", 3 * chunk.sequences).reshape(-1, 3)
        ids = np.frombuffer(text, kind, offset=24 * chunk.sequences)
        first = 0
        for length, sample, start in numbers.tolist():
            stored = _Stored(number, first, ids[first : first + length], sample, start)
            first += length
            self._texts.setdefault(_digest(stored.ids), []).append(stored)
            for size in PREFIXES:
                if size < length:
                    self._beginnings.setdefault(_digest(stored.ids[:size]), []).append(stored)
        if first != chunk.tokens:
            raise ConfigError(self.key, f"chunk {number} of {self.path} is damaged", RECORD_AGAIN)

    def find(
        self, ids: Array, sample: int = -1, start: int = 0
    ) -> tuple[Array, Array | None] | None:
        """Return the routes [N, L, K] of a sequence of ids [N], and their weights; None: the file does not have it.

        Of sequences with the same ids that of the same place in the same sample is taken, if there is one, and of
        longer ones that begin with these ids the first.
        """
        same = self._texts.get(_digest(ids), ())
        if not same:
            size = max((size for size in PREFIXES if size <= len(ids)), default=0)
            longer = self._beginnings.get(_digest(ids[:size]), ())
            same = [stored for stored in longer if np.array_equal(stored.ids[: len(ids)], ids)][:1]
        if not same:
            return None
        at_place = (stored for stored in same if (stored.sample, stored.start) == (sample, start))
        stored = next(at_place, same[0])
        routes, weights = self._chunk(stored.chunk)
        rows = slice(stored.first, stored.first + len(ids))
        return routes[rows], None if weights is None else weights[rows]

    def _chunk(self, number: int) -> tuple[Array, Array | None]:
        if number in self._routes:
            self._routes.move_to_end(number)
            return self._routes[number]
        chunk, header = self.header.chunks[number], self.header
        shape = (chunk.tokens, len(header.layout.layers), header.layout.width)
        count = int(np.prod(shape))
        kind = np.dtype(header.routes)
        weight_bytes = 0 if header.weights is None else np.dtype(header.weights).itemsize
        offset = chunk.offset + chunk.text_bytes
        content = self._decompress(
            number, offset, chunk.route_bytes, count * (kind.itemsize + weight_bytes)
        )
        routes = np.frombuffer(content, kind, count).reshape(shape)
        self._require_experts(routes, number)
        weights = None
        if header.weights is not None:
            weights = np.frombuffer(content, header.weights, offset=count * kind.itemsize)
            weights = weights.reshape(shape)
        self._routes[number] = (routes, weights)
        if len(self._routes) > CACHED_CHUNKS:
            self._routes.popitem(last=False)
        return self._routes[number]

    def _require_experts(self, routes: Array, chunk: int) -> None:
        """Raise ConfigError where a route of a chunk is missing, or names an expert beyond those of its layer."""
        layout = self.header.layout
        is_read = np.arange(layout.width)[None, :] < np.array(layout.top_k)[:, None]  # [L, K]
        outside = routes > np.array(layout.experts)[None, :, None]
        wrong = np.argwhere(outside | ((routes == 0) & is_read))
        if len(wrong):
            token, layer, choice = wrong[0].tolist()
            expert, path = int(routes[token, layer, choice]) - 1, layout.layers[layer]
            where = "to no expert" if expert < 0 else f"to expert {expert}"
            what = f"{self.path} sends token {token} of chunk {chunk} {where} in layer {path}"
            raise ConfigError(self.key, f"{what}, which has {layout.experts[layer]}", RECORD_AGAIN)


def _digest(ids: Array) -> bytes:
    return hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=16).digest()


def pieces_of(documents: Array | None, length: int) -> list[tuple[int, int]]:
    """Return [start, end) of each document among the `length` tokens of a sample, by their documents [T]; None: one."""
    if documents is None:
        return [(0, length)]
    ends = [*(np.flatnonzero(documents[1:] != documents[:-1]) + 1).tolist(), length]
    return list(zip([0, *ends[:-1]], ends, strict=True))
