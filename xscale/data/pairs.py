"""Samples of pairs: a source and a target, each truncated or padded to its length, so that shapes are static."""

import numpy as np
from numpy.typing import NDArray

from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.packed import ShuffledDataset
from xscale.data.prepared import Split

TEXT, PADDING = 0, 1
"""Document numbers in a sample: those of the two texts, and of what pads them."""


class PairDataset(ShuffledDataset):
    """The pairs of a split, epoch after epoch: sample k of an epoch in order is pair k."""

    def __init__(self, split: Split, config: DataConfig, pad: int, *, seed: int = 0, shuffle: bool = True) -> None:
        super().__init__(seed, shuffle)
        self.split = split
        self.source_length, self.target_length = config.source_length, config.target_length
        self.pad = pad
        self.length = split.documents
        if self.length == 0:
            fix = "Give more pairs, or (validation) a larger data.validation."
            raise ConfigError("data.source", f"the {split.name} split has no pairs", fix)

    def sample(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (tokens [S+T], documents [S+T]) of sample `index`, counted over all epochs.

        A source that is too long keeps its end-of-document token, which the model reads as its end; a target loses it.
        """
        pair = int(self.positions(np.array([index], dtype=np.int64))[0])
        indexed, first = self.split.indexed, self.split.first
        sequence = indexed.bounds[first + pair]
        begin, middle, end = indexed.sequence_starts[sequence : sequence + 3].tolist()
        tokens = np.full(self.source_length + self.target_length, self.pad, dtype=np.int64)
        documents = np.full_like(tokens, PADDING)
        read = min(middle - begin, self.source_length)
        tokens[: read - 1] = indexed.tokens[begin : begin + read - 1]
        tokens[read - 1] = indexed.tokens[middle - 1]
        documents[:read] = TEXT
        written = min(end - middle, self.target_length)
        tokens[self.source_length : self.source_length + written] = indexed.tokens[middle : middle + written]
        documents[self.source_length : self.source_length + written] = TEXT
        return tokens, documents

    def truncated(self) -> tuple[int, int]:
        """Count the pairs of an epoch whose source, and whose target, is truncated."""
        longer = (self.split.pair_lengths > [self.source_length, self.target_length]).sum(0)
        return int(longer[0]), int(longer[1])
