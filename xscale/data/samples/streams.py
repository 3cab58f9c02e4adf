"""Contiguous streams of text: row r of every batch reads consecutive segments of a stream of its own.

The text of L segments is a ring. Row r of B begins at segment floor(r L / B) and reads one segment in each step, so
that in L / B steps each segment is read once, and the order is a function of the sample's number alone.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xscale.core.errors import ConfigError
from xscale.data.samples.packed import PackedDataset


class StreamDataset:
    """The samples of a packed split in streams: sample i is segment i // B of row i % B."""

    def __init__(self, packed: PackedDataset, streams: int) -> None:
        """`packed` is in the order of the text; `streams` is B."""
        self.packed = packed
        self.streams = streams
        self.split = packed.split
        self.sequence_length = packed.sequence_length
        if streams > len(packed):
            what = (
                f"the {packed.split.name} split has {len(packed)} segments of {packed.sequence_length} tokens, "
                f"and the stream of each of the {streams} rows of a batch needs one"
            )
            fix = "Use a smaller train.batch_size or data.sequence_length, or more text."
            raise ConfigError("data.order", what, fix)

    def __len__(self) -> int:
        """Segments in an epoch."""
        return len(self.packed)

    def padding_share(self) -> float | None:
        """Return None: samples are packed."""
        return None

    def positions(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map sample indices [N], counted over all epochs, to segments of the text [N]."""
        return self._segments_read(index) % len(self)

    def draw_number(self, index: int) -> int:
        """Return the number by which what is random in sample `index` is drawn, as `PackedDataset` does."""
        if self.packed.dupe_factor is None:
            return index
        epoch, position = divmod(int(self._segments_read(np.array([index]))[0]), len(self))
        return position + epoch % self.packed.dupe_factor * len(self)

    def _segments_read(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the segments from the begin of the text to each sample [N], with those of whole epochs."""
        segment, row = np.divmod(index, self.streams)
        return row * len(self) // self.streams + segment

    def begins(self, index: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each of the samples [N] continues no earlier one: a row's first, or the text's first."""
        begins: NDArray[np.bool_] = np.logical_or(index < self.streams, self.positions(index) == 0)
        return begins

    def sample(self, index: int) -> tuple[NDArray[Any], ...]:
        """Return (tokens [T+1], documents [T+1]) of sample `index`."""
        return self.packed.chunk(int(self.positions(np.array([index], dtype=np.int64))[0]))
