"""Megatron's indexed dataset (`.bin/.idx` pair), byte for byte: concatenated tokens and an index of documents.

The index: `MMIDIDX\\0\\0`, version 1 (u64), type code (u8), count of sequences and of document bounds (u64 each), then
lengths (i32), byte offsets (i64) and document bounds as sequence numbers (i64), all little-endian.
"""

import contextlib
import hashlib
import struct
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from xscale.core.errors import ConfigError
from xscale.core.files.atomic_write import atomic_write, reporting_full_disk, write_atomically
from xscale.core.files.file_safety import check_readable, open_regular
from xscale.data.token_starts import DocumentStarts, TokenStarts, not_contiguous

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
CODES: dict[int, Any] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
UINT16_BELOW = 65500
"""Smaller vocabularies are written as uint16, larger ones as int32, as Megatron does."""


def token_type(vocabulary: int) -> Any:
    """Return the dtype in which tokens of a vocabulary are written."""
    return np.uint16 if vocabulary < UINT16_BELOW else np.int32


def suffixed(prefix: Path, ending: str) -> Path:
    """Append an ending, such as `.bin`; the prefix may contain dots."""
    return prefix.with_name(prefix.name + ending)


class IndexedWriter:
    """Writes a pair under temporary names; `finish` flushes it and makes it visible, the index last."""

    def __init__(self, prefix: Path, dtype: Any, sequences: int | None = 1) -> None:
        """`sequences`: those of each document, two for a pair of a source and a target; None: as many as it has."""
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        self.sequences = sequences
        self.lengths: list[NDArray[np.int32]] = []
        self.counts: list[NDArray[np.int64]] = []
        """Sequences of each document."""
        self.tokens = 0
        self.digest = hashlib.sha256()
        self.bin, self.idx = suffixed(prefix, ".bin"), suffixed(prefix, ".idx")
        self.open_file = contextlib.ExitStack()
        with reporting_full_disk(self.bin):
            prefix.parent.mkdir(parents=True, exist_ok=True)
            self.stream: IO[bytes] = self.open_file.enter_context(atomic_write(self.bin, "wb"))

    @property
    def documents(self) -> int:
        """Documents written so far."""
        return sum(map(len, self.counts))

    def add(self, *sequences: NDArray[Any] | list[int]) -> None:
        """Append one document by its sequences, each including its end-of-document token."""
        arrays = [np.asarray(tokens, dtype=self.dtype) for tokens in sequences]
        lengths = np.array([len(tokens) for tokens in arrays], dtype=np.int32)
        self.extend(np.concatenate(arrays), lengths, np.array([len(arrays)], dtype=np.int64))

    def extend(
        self, tokens: NDArray[Any], lengths: NDArray[np.int32], counts: NDArray[np.int64]
    ) -> None:
        """Append concatenated sequences with `lengths`, of which each document has as many as `counts` says; both are
        empty if the document continues in the next call."""
        assert self.sequences is None or (counts == self.sequences).all(), (
            f"{counts} in a file of {self.sequences} each"
        )
        assert int(counts.sum()) == len(lengths), (
            f"{len(lengths)} sequences in documents of {counts}"
        )
        assert tokens.dtype == self.dtype, f"{tokens.dtype} tokens in a file of {self.dtype}"
        block = tokens.tobytes()
        with reporting_full_disk(self.bin):
            self.stream.write(block)
        self.digest.update(block)
        self.tokens += len(tokens)
        if len(lengths):
            self.lengths.append(lengths)
            self.counts.append(counts)

    def finish(self) -> dict[str, str]:
        """Close the pair and return the SHA-256 of each file by its name."""
        lengths = np.concatenate(self.lengths) if self.lengths else np.zeros(0, np.int32)
        assert int(lengths.sum(dtype=np.int64)) == self.tokens, (
            "the lengths do not add up to the tokens"
        )
        index = index_bytes(
            lengths, self.dtype, np.concatenate(self.counts) if self.counts else None
        )
        with reporting_full_disk(self.bin):
            self.open_file.close()
            write_atomically(self.idx, index)
        return {
            self.bin.name: self.digest.hexdigest(),
            self.idx.name: hashlib.sha256(index).hexdigest(),
        }

    def discard(self) -> None:
        """Delete the temporary file."""
        # Closing flushes, which fails once more on a full disk.
        with contextlib.suppress(OSError, _DiscardedError), self.open_file:
            raise _DiscardedError


class _DiscardedError(Exception):
    """Makes `atomic_write` remove its temporary file."""


def index_bytes(
    lengths: NDArray[np.int32], dtype: Any, counts: NDArray[np.int64] | None = None
) -> bytes:
    """Encode the index of sequences with `lengths` tokens; `counts` has those of each document, None: one each."""
    code = next(code for code, known in CODES.items() if np.dtype(known) == np.dtype(dtype))
    offsets = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
    offsets *= np.dtype(dtype).itemsize
    bounds = np.zeros((len(lengths) if counts is None else len(counts)) + 1, dtype=np.int64)
    np.cumsum(np.ones(len(lengths), np.int64) if counts is None else counts, out=bounds[1:])
    header = HEADER.pack(MAGIC, 1, code, len(lengths), len(bounds))
    return (
        header
        + lengths.astype("<i4").tobytes()
        + offsets.astype("<i8").tobytes()
        + bounds.astype("<i8").tobytes()
    )


SMALL_INDEX = 1 << 20
"""Entries of an index that is checked whole when it is opened; of a larger one `WINDOWS` evenly spaced parts are."""
WINDOWS, WINDOW = 64, 4096


def checked_windows(entries: int) -> list[slice]:
    """Return the parts of so many entries that are checked when an index is opened, the first and the last among them.

    Every process of a job opens the index, and all of it may be gigabytes.
    """
    if entries <= SMALL_INDEX:
        return [slice(0, entries)]
    starts = np.linspace(0, entries - WINDOW, WINDOWS).astype(np.int64).tolist()
    return [slice(start, start + WINDOW) for start in starts]


def _total(dtype: np.dtype[Any], lengths: NDArray[Any], offsets: NDArray[Any]) -> int:
    """Tokens of all sequences; of a large index by the end of the last one."""
    if len(lengths) <= SMALL_INDEX:
        return int(lengths.sum(dtype=np.int64))
    return int(offsets[-1]) // dtype.itemsize + int(lengths[-1])


class IndexedDataset:
    """A pair, memory-mapped: concatenated `tokens` [N], and where in them the documents and their sequences start."""

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.bin, self.idx = suffixed(prefix, ".bin"), suffixed(prefix, ".idx")
        dtype, lengths, offsets, bounds = self._index()
        total = _total(dtype, lengths, offsets)
        self._check_sizes(dtype, total)
        self._check_order(dtype, lengths, offsets, bounds)
        self.sequence_starts = TokenStarts(self.idx, offsets, dtype.itemsize, total)
        """[sequences + 1], with the end."""
        self.bounds: NDArray[np.int64] = bounds
        """Number of each document's first sequence [documents + 1], with the number of sequences."""
        self.starts = DocumentStarts(self.sequence_starts, bounds)
        """[documents + 1], with the end."""
        self.tokens: NDArray[Any] = (
            np.memmap(self.bin, dtype=dtype, mode="r") if total else np.zeros(0, dtype)
        )

    def _index(self) -> tuple[np.dtype[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        try:
            size = self.idx.stat().st_size
            with open_regular(self.idx) as stream:
                head = stream.read(HEADER.size)
        except OSError as error:
            what = f"the index cannot be read: {error.strerror}"
            raise ConfigError(
                str(self.idx), what, "Run `xscale data prepare`, or give another path."
            ) from None
        if len(head) < HEADER.size or head[: len(MAGIC)] != MAGIC:
            raise ConfigError(
                str(self.idx),
                "this is not a Megatron index (its first bytes differ)",
                "Name a .bin/.idx pair.",
            )
        _, version, code, sequences, bounds = HEADER.unpack(head)
        if version != 1 or CODES.get(code) is None or np.dtype(CODES[code]).kind == "f":
            what = f"version {version} with type code {code} cannot be read"
            raise ConfigError(str(self.idx), what, "Version 1 with integer tokens can.")
        need = HEADER.size + sequences * 12 + bounds * 8
        # A multimodal index has another byte per sequence, which does not concern text.
        if size not in (need, need + sequences):
            what = f"the index is {size} bytes long, but its {sequences} sequences and {bounds} bounds need {need}"
            raise ConfigError(str(self.idx), what, "It is damaged: write or copy the pair again.")
        data = np.memmap(self.idx, dtype=np.uint8, mode="r")
        second, third = HEADER.size + sequences * 4, HEADER.size + sequences * 12
        return (
            np.dtype(CODES[code]),
            np.frombuffer(data, "<i4", sequences, HEADER.size),
            np.frombuffer(data, "<i8", sequences, second),
            np.frombuffer(data, "<i8", bounds, third),
        )

    def _check_order(
        self,
        dtype: np.dtype[Any],
        lengths: NDArray[Any],
        offsets: NDArray[Any],
        bounds: NDArray[Any],
    ) -> None:
        """Raise ConfigError unless sequences and documents follow each other; of a large index in `checked_windows`.

        What is read outside of these is checked when it is read.
        """
        for window in checked_windows(len(lengths)):
            if np.any(lengths[window] < 0):
                what = "a sequence has a negative length"
                raise ConfigError(str(self.idx), what, "It is damaged: write the pair again.")
            before = offsets[window]
            ends = before[:-1] + lengths[window][:-1].astype(np.int64) * dtype.itemsize
            first = 0 if window.start == 0 else before[:1]
            if np.any(before[:1] != first) or not np.array_equal(ends, before[1:]):
                raise not_contiguous(self.idx)
        ordered = all(
            not np.any(np.diff(bounds[window]) < 0) for window in checked_windows(len(bounds))
        )
        if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != len(lengths) or not ordered:
            raise ConfigError(
                str(self.idx),
                "the document bounds do not cover the sequences",
                "Write the pair again.",
            )

    def _check_sizes(self, dtype: np.dtype[Any], total: int) -> None:
        try:
            size = self.bin.stat().st_size
            check_readable(self.bin)
        except OSError as error:
            raise ConfigError(
                str(self.bin),
                f"the tokens cannot be read: {error.strerror}",
                "Copy the pair again.",
            ) from None
        need = total * dtype.itemsize
        if size != need:
            what = f"it is {size} bytes long, but {self.idx.name} describes {total} tokens, {need} bytes"
            raise ConfigError(
                str(self.bin),
                what,
                "It is damaged or not the pair of this index: write or copy it again.",
            )

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.starts) - 1

    def document(self, index: int) -> NDArray[Any]:
        """Return the tokens of one document; ConfigError where the index does not say where it is."""
        begin, end = self.starts[np.array([index, index + 1])]
        return self.tokens[begin:end]
