"""Packing: concatenated documents split into samples, in an order that is a pure function of seed and index."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xscale.core.errors import ConfigError
from xscale.data.corpus.prepared import Split

ROUNDS = 6


def permuted(index: NDArray[np.int64], length: int, seed: int) -> NDArray[np.int64]:
    """Map each `index` [N] in [0, length) by the permutation of `length` given by `seed`.

    A Feistel network over the indices with cycle walking (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains"): the permutation is never stored.
    """
    if length <= 1:
        return index.copy()
    half = np.uint64(max(1, ((length - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = _mix(
        np.arange(1, ROUNDS + 1, dtype=np.uint64) + _mix(np.array([seed % 2**64], dtype=np.uint64))
    )
    result = index.astype(np.uint64)
    outside = np.ones(result.shape, dtype=bool)
    while outside.any():
        left, right = result[outside] >> half, result[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        result[outside] = (left << half) | right
        outside = result >= length
    return result.astype(np.int64)


def _mix(x: NDArray[Any]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele et al. 2014): every bit of the input moves every bit of the output."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        result: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
        return result


class ShuffledDataset:
    """Samples that are counted over all epochs, each of which has an order of its own."""

    length: int
    """Samples in an epoch."""
    dupe_factor: int | None = None
    """Epochs after which what is random in a text is what it was; None: it is drawn anew in each."""

    def __init__(self, seed: int, shuffle: bool) -> None:
        self.seed = seed
        self.shuffle = shuffle

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self.length

    def padding_share(self) -> float | None:
        """Return the share of padding in the tokens of an epoch; None where samples are packed or drawn anew."""
        return None

    def draw_number(self, index: int) -> int:
        """Return the number by which what is random in sample `index` is drawn.

        It is the sample's own, and with a `dupe_factor` that of its text in an epoch of as many: it repeats with them.
        """
        if self.dupe_factor is None:
            return index
        place = int(self.positions(np.array([index], dtype=np.int64))[0])
        return place + index // self.length % self.dupe_factor * self.length

    def positions(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map sample indices [N], counted over all epochs, to places in the text [N]."""
        epochs, within = np.divmod(index, self.length)
        if not self.shuffle:
            return within
        result = np.empty_like(within)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            # Seeds of different runs and epochs must differ: seed 1 epoch 0 is not seed 0 epoch 1.
            result[chosen] = permuted(within[chosen], self.length, (self.seed << 32) + int(epoch))
        return result


class PackedDataset(ShuffledDataset):
    """The samples of a split, epoch after epoch.

    Chunk k of the text is tokens [kT, kT + T + 1): adjacent chunks share one token, so that each token but the first is
    predicted once per epoch; fewer than T tokens at the end are dropped.
    """

    def __init__(
        self, split: Split, sequence_length: int, *, seed: int = 0, shuffle: bool = True
    ) -> None:
        super().__init__(seed, shuffle)
        self.split = split
        self.sequence_length = sequence_length
        self.tokens = split.tokens
        self.starts = split.indexed.starts
        self.offset = self.starts[split.first]
        """The split's first token among those of the pair."""
        self.length = max(0, (len(self.tokens) - 1) // sequence_length)
        if self.length == 0:
            what = f"the {split.name} split has {len(self.tokens)} tokens, but a sample needs {sequence_length + 1}"
            fix = "Use a smaller data.sequence_length, more text, or (validation) a larger data.validation."
            raise ConfigError("data.sequence_length", what, fix)

    def sample(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (tokens [T+1], documents [T+1]) of sample `index`, counted over all epochs."""
        return self.chunk(int(self.positions(np.array([index], dtype=np.int64))[0]))

    @staticmethod
    def full_sample(
        length: int, token: int, document: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return a sample for `length` tokens T, of one token, in documents of `document` tokens."""
        return np.full(length + 1, token), np.arange(length + 1) // document

    def chunk(self, position: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (tokens [T+1], documents [T+1]) of chunk `position`; documents count from 0 in each chunk."""
        begin = position * self.sequence_length
        end = begin + self.sequence_length + 1
        tokens = self.tokens[begin:end].astype(np.int64)
        # Starts strictly inside the chunk; an empty document marks the same token twice.
        split, begin, end = self.split, begin + self.offset, end + self.offset
        first = self.starts.search(begin, "right", split.first, split.stop)
        last = self.starts.search(end, "left", first, split.stop)
        marks = np.zeros(self.sequence_length + 1, dtype=np.int64)
        np.add.at(marks, self.starts[first:last] - begin, 1)
        return tokens, np.cumsum(marks)
