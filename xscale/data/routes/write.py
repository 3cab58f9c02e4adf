"""Writes a file of routes chunk by chunk, from a forward that is recorded or from arrays of another engine."""

import os
import zlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xscale.core.errors import ConfigError
from xscale.core.files.atomic_write import atomic_write
from xscale.data.routes.header import PREFIX, RouteChunk, RouteHeader, RouteLayout, pack_prefix

Array = NDArray[Any]
CHUNK_TOKENS = 1 << 15
"""Tokens after which a chunk is written: what a look-up decompresses at a time."""
LEVEL = 1
"""zlib's compression: the fastest; higher levels take three times as long for a tenth of the bytes."""


@dataclass(frozen=True)
class RoutedSequence:
    """Tokens that a model reads as one sequence, and their routes."""

    ids: Array
    """[N] ids, as the model reads them."""
    routes: Array
    """[N, L, K] expert plus 1, or 0 for none."""
    weights: Array | None = None
    """[N, L, K] factors of the experts' outputs; None: not recorded."""
    sample: int = -1
    """Number of the sample that it is of; -1: not known."""
    start: int = 0
    """Index in the sample of its first token."""


def narrowest(largest: int) -> str:
    """Return the narrowest unsigned dtype that has the number."""
    return str(np.min_scalar_type(largest))


class RouteWriter:
    """Writes `path` in one step when it is closed; a writer that is abandoned leaves nothing. Methods raise OSError."""

    def __init__(
        self, path: Path, layout: RouteLayout, vocabulary: int, weights: str | None
    ) -> None:
        """`vocabulary`: ids are below it. `weights`: dtype of the weights; None: they are not written."""
        self.layout = layout
        self.ids, self.routes = narrowest(vocabulary - 1), narrowest(max(layout.experts))
        self.weights = weights
        self._chunks: list[RouteChunk] = []
        self._pending: list[RoutedSequence] = []
        self._tokens = 0
        self._open = ExitStack()
        self._file = self._open.enter_context(atomic_write(path, "wb"))
        try:
            self._file.write(bytes(PREFIX.size))
        except BaseException:
            self.abandon()
            raise

    def add(self, sequence: RoutedSequence) -> None:
        """Add a sequence."""
        self._pending.append(sequence)
        self._tokens += len(sequence.ids)
        if self._tokens >= CHUNK_TOKENS:
            self._write_chunk()

    def copy_chunks(self, header: RouteHeader, content: Any) -> None:
        """Add the chunks of another file of the same layout and dtypes, by its bytes."""
        self._write_chunk()
        for chunk in header.chunks:
            end = chunk.offset + chunk.text_bytes + chunk.route_bytes
            offset = self._file.tell()
            self._file.write(content[chunk.offset : end])
            self._chunks.append(
                RouteChunk(
                    offset, chunk.text_bytes, chunk.route_bytes, chunk.sequences, chunk.tokens
                )
            )

    def close(self) -> None:
        """Write what is pending and the header, and put the file in its place."""
        with self._open:
            self._write_chunk()
            header = RouteHeader(
                self.layout, self.ids, self.routes, self.weights, tuple(self._chunks)
            ).encode()
            offset = self._file.tell()
            self._file.write(header)
            self._file.seek(0)
            self._file.write(pack_prefix(header, offset))

    def abandon(self) -> None:
        """Remove what was written."""
        with suppress(_AbandonedError, OSError), self._open:
            raise _AbandonedError

    def _write_chunk(self) -> None:
        if not self._pending:
            return
        sequences, self._pending, self._tokens = self._pending, [], 0
        numbers = np.array(
            [(len(sequence.ids), sequence.sample, sequence.start) for sequence in sequences], "<i8"
        )
        text = numbers.tobytes() + b"".join(
            sequence.ids.astype(self.ids).tobytes() for sequence in sequences
        )
        routed = b"".join(sequence.routes.astype(self.routes).tobytes() for sequence in sequences)
        if self.weights is not None:
            for sequence in sequences:
                assert sequence.weights is not None, "a sequence without weights"
                routed += sequence.weights.astype(self.weights).tobytes()
        parts = [_compressed(text), _compressed(routed)]
        offset = self._file.tell()
        self._file.write(b"".join(parts))
        tokens = sum(len(sequence.ids) for sequence in sequences)
        self._chunks.append(
            RouteChunk(offset, len(parts[0]), len(parts[1]), len(sequences), tokens)
        )


class _AbandonedError(Exception):
    pass


def _compressed(content: bytes) -> bytes:
    return zlib.compress(content, LEVEL)


def write_routes(
    path: str | os.PathLike[str],
    sequences: Iterable[Sequence[Any]],
    *,
    layers: Sequence[str],
    experts: int,
    tokenizer: str | None = None,
) -> None:
    """Write routes of another engine to a file that `moe.replay.file` reads.

    Each of `sequences` is (ids [N], experts [N, L, K]), or (ids, experts, weights [N, L, K]): the tokens that the model
    reads of a document, and the experts of each in the order of `layers`, the paths of the model's mixtures, as the
    array [tokens, layers, top_k] that vLLM and SGLang return for a request. A last token that the engine has sampled
    and not read has no route, and is to be left out of the ids. `tokenizer`: the fingerprint of the tokenizer that made
    the ids, which a run of another tokenizer refuses; None: not known.

    ConfigError, with the sequence and the token, for arrays that do not fit together and experts out of range.
    """
    all_sequences = [
        _checked(number, arrays, len(layers), experts) for number, arrays in enumerate(sequences)
    ]
    if not all_sequences:
        raise ConfigError("sequences", "there is no sequence", "Give at least one.")
    widths = {sequence.routes.shape[2] for sequence in all_sequences}
    weighted = {sequence.weights is not None for sequence in all_sequences}
    if len(widths) > 1 or len(weighted) > 1:
        what = (
            "sequences differ in top_k"
            if len(widths) > 1
            else "some sequences have weights, and others none"
        )
        raise ConfigError("sequences", what, "Give arrays of one kind.")
    count = len(layers)
    layout = RouteLayout(
        tuple(layers), (experts,) * count, (widths.pop(),) * count, None, tokenizer
    )
    vocabulary = 1 + max(int(sequence.ids.max()) for sequence in all_sequences)
    writer = RouteWriter(Path(path), layout, vocabulary, "float64" if weighted.pop() else None)
    try:
        for sequence in all_sequences:
            writer.add(sequence)
    except BaseException:
        writer.abandon()
        raise
    writer.close()


def _checked(number: int, arrays: Sequence[Any], layers: int, experts: int) -> RoutedSequence:
    """Return sequence `number` of arrays of another engine; ConfigError where they do not fit."""
    where = f"sequences[{number}]"
    ids, chosen = (np.asarray(array, dtype=np.int64) for array in arrays[:2])
    weights = np.asarray(arrays[2], dtype=np.float64) if len(arrays) > 2 else None
    if ids.ndim != 1 or not len(ids):
        raise ConfigError(where, f"ids have the shape {list(ids.shape)}", "Give ids [tokens].")
    if chosen.ndim != 3 or chosen.shape[:2] != (len(ids), layers):
        what = f"routes have the shape {list(chosen.shape)}, for {len(ids)} ids and {layers} layers"
        raise ConfigError(where, what, "Give routes [tokens, layers, top_k].")
    if weights is not None and weights.shape != chosen.shape:
        what = f"weights have the shape {list(weights.shape)}, and routes {list(chosen.shape)}"
        raise ConfigError(where, what, "Give a weight for each route.")
    outside = np.argwhere((chosen < 0) | (chosen >= experts))
    if len(outside):
        token, layer, choice = outside[0].tolist()
        what = f"token {token} has expert {chosen[token, layer, choice]} in layer {layer}, of {experts} experts"
        raise ConfigError(where, what, "Give experts from 0.")
    return RoutedSequence(ids, chosen + 1, weights)
