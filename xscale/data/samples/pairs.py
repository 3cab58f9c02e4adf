"""Samples of pairs: a source and a target, each truncated or padded to its length, so that shapes are static."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from xscale.core.errors import ConfigError, Problem
from xscale.data.config import DataConfig
from xscale.data.corpus.prepared import PreparedData, Split
from xscale.data.samples.packed import ShuffledDataset

TEXT, PADDING = 0, 1
"""Document numbers in a sample: those of the two texts, and of what pads them."""


class PairDataset(ShuffledDataset):
    """The pairs of a split, epoch after epoch: sample k of an epoch in order is pair k."""

    def __init__(
        self, split: Split, config: DataConfig, pad: int, *, seed: int = 0, shuffle: bool = True
    ) -> None:
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
        indexed = self.split.indexed
        begin, middle, end = self._bounds(index)
        tokens = np.full(self.source_length + self.target_length, self.pad, dtype=np.int64)
        documents = np.full_like(tokens, PADDING)
        read = min(middle - begin, self.source_length)
        tokens[: read - 1] = indexed.tokens[begin : begin + read - 1]
        tokens[read - 1] = indexed.tokens[middle - 1]
        documents[:read] = TEXT
        written = min(end - middle, self.target_length)
        tokens[self.source_length : self.source_length + written] = indexed.tokens[
            middle : middle + written
        ]
        documents[self.source_length : self.source_length + written] = TEXT
        return tokens, documents

    @staticmethod
    def full_sample(config: DataConfig, token: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return a sample without padding, of one token."""
        tokens = np.full(config.source_length + config.target_length, token)
        return tokens, np.full_like(tokens, TEXT)

    def pair(self, index: int) -> tuple[list[int], list[int]]:
        """Return the ids of source and target of sample `index`, each whole and without its end."""
        begin, middle, end = self._bounds(index)
        tokens = self.split.indexed.tokens
        return tokens[begin : middle - 1].tolist(), tokens[middle : end - 1].tolist()

    def _bounds(self, index: int) -> tuple[int, int, int]:
        """First token of the source, first of the target, and the one after it, of sample `index`."""
        pair = int(self.positions(np.array([index], dtype=np.int64))[0])
        sequence = self.split.indexed.bounds[self.split.first + pair]
        begin, middle, end = self.split.indexed.sequence_starts[sequence : sequence + 3].tolist()
        return begin, middle, end

    def truncated(self) -> tuple[int, int]:
        """Count the pairs of an epoch whose source, and whose target, is truncated."""
        longer = (self.split.pair_lengths > [self.source_length, self.target_length]).sum(0)
        return int(longer[0]), int(longer[1])

    def padding_share(self) -> float:
        """Return the share of padding in the tokens of an epoch."""
        kept = np.minimum(self.split.pair_lengths, [self.source_length, self.target_length])
        return 1 - int(kept.sum()) / (self.length * (self.source_length + self.target_length))


def require_room_behind_prefix(config: DataConfig, datasets: Sequence[PreparedData]) -> None:
    """Refuse pairs whose prefix leaves no room in a source for a token of its text: ConfigError names each dataset."""
    problems = []
    for number, data in enumerate(datasets):
        prefix = (
            data.manifest.source.get("prefix") if data.pairs and data.manifest is not None else None
        )
        if not isinstance(prefix, str) or not prefix:
            continue
        count = len(data.tokenizer.encode_prompt(prefix))
        if count <= config.source_length - 2:
            continue
        what = f"the prefix {prefix[:40]!r} has {count} tokens, and a source has {config.source_length} with its end"
        path, fix = "data.source.prefix", "Give a shorter one"
        if config.blend or config.prepared is not None:
            path = f"data.blend.{number}.prepared" if config.blend else "data.prepared"
            what, fix = (
                f"{what} ({data.path})",
                "Prepare the pairs with a shorter data.source.prefix",
            )
        problems.append(
            Problem(path, what, f"{fix}, or take a data.max_source_length of at least {count + 2}.")
        )
    if problems:
        raise ConfigError(problems)
