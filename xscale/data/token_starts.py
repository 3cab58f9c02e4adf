"""Where documents or sequences start in the tokens of a pair, read from the mapped index: no process holds them.

An index of 10^8 documents has 0.8 GB of starts. They are pages of a file, which the processes of a node share, and a
sample reads a few of them.
"""

from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from xscale.core.errors import ConfigError


class TokenStarts:
    """The starts [N + 1] of N sequences, with the end of the last; read as an array is, a slice at a time.

    ConfigError where those that are read do not follow each other.
    """

    def __init__(self, path: Path, offsets: NDArray[np.int64], itemsize: int, total: int) -> None:
        """`offsets` [N]: the mapped byte offset of each sequence in the index at `path`; `total` tokens."""
        self.path = path
        self.offsets, self.itemsize, self.total = offsets, itemsize, total

    def __len__(self) -> int:
        return len(self.offsets) + 1

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: "slice | list[int] | NDArray[np.int64]") -> NDArray[np.int64]: ...
    def __getitem__(self, key: "int | slice | list[int] | NDArray[np.int64]") -> Any:
        if isinstance(key, slice):
            first, stop, step = key.indices(len(self))
            assert step > 0, "starts are read in their order"
            return self._slice(first, stop)[::step]
        if isinstance(key, np.ndarray | list):
            return self._at(np.asarray(key))
        index = range(len(self))[key]
        return (
            self.total if index == len(self.offsets) else int(self.offsets[index]) // self.itemsize
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """All starts, for tools that read all documents."""
        return self[:].astype(dtype, copy=False)

    def search(
        self,
        token: int,
        side: Literal["left", "right"] = "left",
        first: int = 0,
        stop: int | None = None,
    ) -> int:
        """Return the first place in [first, stop) whose start is at least `token`, with "right" above it."""
        bisect = bisect_left if side == "left" else bisect_right
        return bisect(self, token, first, len(self) if stop is None else stop)

    def _slice(self, first: int, stop: int) -> NDArray[np.int64]:
        count = len(self.offsets)
        starts = np.full(max(stop - first, 0), self.total, dtype=np.int64)
        inside = self.offsets[first : min(stop, count)]
        np.floor_divide(inside, self.itemsize, out=starts[: len(inside)])
        return self._checked(starts)

    def _at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        count = len(self.offsets)
        if not count:
            return np.full(places.shape, self.total, dtype=np.int64)
        read = self.offsets[np.minimum(places, count - 1)] // self.itemsize
        starts: NDArray[np.int64] = np.where(places < count, read, self.total)
        return self._checked(starts, ordered=not np.any(np.diff(places) < 0))

    def _checked(self, starts: NDArray[np.int64], *, ordered: bool = True) -> NDArray[np.int64]:
        if (
            np.any(starts < 0)
            or np.any(starts > self.total)
            or (ordered and np.any(np.diff(starts) < 0))
        ):
            raise not_contiguous(self.path)
        return starts


class DocumentStarts(TokenStarts):
    """The starts [documents + 1] of documents of several sequences, by the number of each document's first sequence."""

    def __init__(self, sequences: TokenStarts, bounds: NDArray[np.int64]) -> None:
        super().__init__(sequences.path, sequences.offsets, sequences.itemsize, sequences.total)
        self.sequences, self.bounds = sequences, bounds

    def __len__(self) -> int:
        return len(self.bounds)

    def __getitem__(self, key: Any) -> Any:
        return self.sequences[
            self.bounds[key]
            if isinstance(key, slice | list | np.ndarray)
            else int(self.bounds[key])
        ]


def not_contiguous(path: Path) -> ConfigError:
    """Return the refusal of an index whose sequences do not follow each other."""
    return ConfigError(
        str(path), "the sequences are not contiguous", "Write the pair again, without gaps."
    )
