"""Samples of labelled examples: one or two texts with their label, truncated or padded, so that shapes are static."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus.labels import NO_TAG, decode_labels
from xscale.data.indexed import IndexedDataset
from xscale.data.samples.packed import ShuffledDataset
from xscale.data.samples.pairs import PADDING, TEXT
from xscale.data.source.source import Labels
from xscale.data.tokenizer.tokenizer import Tokenizer


class LabelledDataset(ShuffledDataset):
    """The examples of a split, epoch after epoch: sample k of an epoch in order is example k."""

    def __init__(
        self,
        texts: IndexedDataset,
        column: IndexedDataset,
        labels: Labels,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """`texts` and `column` are the tokens and the labels of the same documents."""
        super().__init__(seed, shuffle)
        self.texts = texts
        self.column = column
        self.labels = labels
        self.sample_length, self.pad = config.sequence_length, tokenizer.pad
        self.begin = [] if tokenizer.bos is None else [tokenizer.bos]
        """Begins each sample: its output stands for the whole example."""
        self.length = len(texts)
        if self.length == 0:
            fix = "Give more examples, or (validation) a larger data.validation."
            raise ConfigError("data.source", "a split has no labelled examples", fix)

    def sample(self, index: int) -> tuple[NDArray[Any], ...]:
        """Return (tokens [T], documents [T], labels [1], or [T] of tags) of sample `index`, counted over all epochs.

        The tokens are the beginning-of-text token, if the tokenizer has one, and each text with its end-of-document
        token; padding follows. The longer of two texts is truncated first; a text keeps its last token.
        """
        example = int(self.positions(np.array([index], dtype=np.int64))[0])
        first, stop = self.texts.bounds[example : example + 2]
        starts = self.texts.sequence_starts[first : stop + 1].tolist()
        lengths = self.kept_lengths(np.diff(starts)[None])[0].tolist()
        tokens = np.full(self.sample_length, self.pad, dtype=np.int64)
        documents = np.full_like(tokens, PADDING)
        at = len(self.begin)
        tokens[:at] = self.begin
        for begin, end, kept in zip(starts, starts[1:], lengths, strict=False):
            tokens[at : at + kept - 1] = self.texts.tokens[begin : begin + kept - 1]
            tokens[at + kept - 1] = self.texts.tokens[end - 1]
            at += kept
        documents[:at] = TEXT
        stored = decode_labels(self.column.document(example), self.labels)
        if self.labels.kind != "tags":
            return tokens, documents, stored
        tags = np.full_like(tokens, NO_TAG)
        tags[len(self.begin) : at - 1] = stored[: lengths[0] - 1]
        return tokens, documents, tags

    @staticmethod
    def full_sample(config: DataConfig, token: int, labels: str) -> tuple[NDArray[Any], ...]:
        """Return an example without padding, of one token, with the first label of that kind, or a score of 0."""
        tokens = np.full(config.sequence_length, token)
        shape = len(tokens) if labels == "tags" else 1
        return (
            tokens,
            np.full_like(tokens, TEXT),
            np.zeros(shape, np.float64 if labels == "score" else np.int64),
        )

    def kept_lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens of each text [examples, texts] of so many tokens are kept."""
        room = self.sample_length - len(self.begin)
        if lengths.shape[1] == 1:
            return np.minimum(lengths, room)
        shorter = np.minimum(lengths.min(1, keepdims=True), room // 2)
        kept: NDArray[np.int64] = np.where(
            lengths <= shorter, lengths, np.minimum(lengths, room - shorter)
        )
        kept[kept.sum(1) > room] = [room - room // 2, room // 2]
        return kept

    def truncated(self) -> int:
        """Count the examples of an epoch that are truncated."""
        lengths = self._lengths()
        return int((self.kept_lengths(lengths) < lengths).any(1).sum())

    def padding_share(self) -> float:
        """Return the share of padding in the tokens of an epoch."""
        kept = self.kept_lengths(self._lengths()).sum(1) + len(self.begin)
        return 1 - int(kept.sum()) / (self.length * self.sample_length)

    def _lengths(self) -> NDArray[np.int64]:
        """Tokens of each text of each example, [examples, texts]."""
        lengths: NDArray[np.int64] = np.diff(self.texts.sequence_starts).reshape(
            len(self.texts), -1
        )
        return lengths
