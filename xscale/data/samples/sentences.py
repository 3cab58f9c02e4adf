"""Samples for objectives on pairs of sentences: consecutive text in two halves, and text of another document.

The prepared data has a sequence for each sentence and a document for each text (the layout of Megatron-LM's BERT data).
A sample is made of a chunk, consecutive sentences that fill it about: they are split between two of them (Devlin et al.
2019, appendix A.2). An objective composes what it needs of the two halves and of the other text.
"""

from contextlib import suppress
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus.prepared import Split
from xscale.data.corpus.split_sentences import split_sentences
from xscale.data.samples.packed import ShuffledDataset
from xscale.data.source.files import line_at
from xscale.data.source.source import SOURCES, Source, validation_below
from xscale.data.tokenizer.tokenizer import Tokenizer

FIRST, SECOND, OTHER, PADDING = 0, 1, 2, 3
"""Document numbers in a sample: the halves of a chunk, in their order, text of another document, and padding."""
SPECIAL_TOKENS = 3
"""Tokens that an objective adds to two texts: [CLS] before the first, and [SEP] after each."""


class SentenceDataset(ShuffledDataset):
    """The chunks of a split, epoch after epoch: sample k of an epoch in order is chunk k.

    The split between its halves, what is truncated and the other text are drawn by seed and sample number, so that
    they differ from epoch to epoch, unless a `dupe_factor` says how many versions a chunk has. A chunk has the
    sentences of a document that start in the same stretch of `budget` tokens; one of a single sentence is left out.
    """

    def __init__(
        self,
        split: Split,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        super().__init__(seed, shuffle)
        self.budget = config.sequence_length - SPECIAL_TOKENS
        """Most tokens of a pair of texts."""
        if self.budget < 2:
            what = (
                f"a pair of texts and its {SPECIAL_TOKENS} special tokens need {SPECIAL_TOKENS + 2}"
            )
            raise ConfigError("data.sequence_length", what, f"Take at least {SPECIAL_TOKENS + 2}.")
        indexed = split.indexed
        self.pad = tokenizer.pad
        self.eos = tokenizer.eos
        self.tokens = indexed.tokens
        self.bounds = indexed.bounds[split.first : split.stop + 1]
        self.starts = indexed.sequence_starts
        self.chunks = _chunks(np.asarray(self.starts), self.bounds, self.budget)
        """First sentence, end and document of each chunk [chunks, 3]."""
        self.length = len(self.chunks)
        self.documents = len(self.bounds) - 1
        self.left_out = self.documents - len(np.unique(self.chunks[:, 2]))
        """Documents of the split without a chunk."""
        remedy = f"a {'smaller' if split.name == 'train' else 'larger'} data.validation"
        if self.length == 0:
            what = (
                f"no document of the {split.name} split has two sentences close enough for a sample"
            )
            fix = f"Give documents of several sentences, prepared with data.split_sentences, or {remedy}."
            if (document := first_of_one_sentence(config, split.name)) is not None:
                what += f"; the first of one sentence: {document}"
            raise ConfigError("data.source", what, fix)
        if len(self.bounds) < 3:
            what = (
                f"the {split.name} split has one document, and a sample takes text of another one"
            )
            raise ConfigError("data.source", what, f"Give more documents, or {remedy}.")

    def sample(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (tokens [2 N], documents [2 N]) of sample `index`, counted over all epochs; N is `budget`.

        They are the first half, the second half, text of another document and padding, one after the other. The first
        half and the other text have at most N tokens together, as the two halves have.
        """
        draws = np.random.default_rng([self.seed, self.draw_number(index)])
        first, stop, document = self.chunks[
            self.positions(np.array([index], dtype=np.int64))[0]
        ].tolist()
        middle = int(draws.integers(first + 1, stop))
        before, after = truncate(
            self._text(first, middle), self._text(middle, stop), self.budget, draws
        )
        other = int(draws.integers(len(self.bounds) - 2))
        other += other >= document
        sentence = int(draws.integers(self.bounds[other], self.bounds[other + 1]))
        available = self._text(sentence, int(self.bounds[other + 1]))
        texts = (before, after, available[: self.budget - len(before)])
        tokens = np.full(2 * self.budget, self.pad, dtype=np.int64)
        documents = np.full_like(tokens, PADDING)
        joined = np.concatenate(texts)
        tokens[: len(joined)] = joined
        documents[: len(joined)] = np.repeat([FIRST, SECOND, OTHER], [len(text) for text in texts])
        return tokens, documents

    @staticmethod
    def full_sample(config: DataConfig, token: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return a sample of one token, whose halves have N tokens together, as the first one and the other text do."""
        budget = config.sequence_length - SPECIAL_TOKENS
        first, second = budget // 2, budget - budget // 2
        lengths = (first, second, second, 2 * budget - first - 2 * second)
        return np.full(2 * budget, token), np.repeat([FIRST, SECOND, OTHER, PADDING], lengths)

    def _text(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return the tokens of the sentences [first, stop), without the one that ends a document."""
        text: NDArray[np.int64] = self.tokens[self.starts[first] : self.starts[stop]].astype(
            np.int64
        )
        return text[:-1] if len(text) and text[-1] == self.eos else text


SEARCHED = 1000
"""Documents of the source that are read to name one in a message."""


def first_of_one_sentence(config: DataConfig, split: str) -> str | None:
    """Return file and line of the source's first document of one sentence in a split, or the document's name.

    None: there is none among the first documents, or the data was not prepared from a source that can be read.
    """
    if config.prepared is not None or config.blend:
        return None
    source: Source = SOURCES.build(config.source)
    with suppress(ConfigError, OSError):
        for document in islice(source.documents(), SEARCHED):
            part = (
                "validation"
                if document.split_hash < validation_below(config.validation)
                else "train"
            )
            if part == split and len(split_sentences(document.text)) == 1:
                file, _, offset = document.name.rpartition(":")
                return (
                    f"{file}:{line_at(file, int(offset))}"
                    if offset.isdigit() and file
                    else document.name
                )
    return None


def _chunks(starts: NDArray[np.int64], bounds: NDArray[np.int64], budget: int) -> NDArray[np.int64]:
    """Return [first sentence, end, document] of each chunk of at least two sentences.

    A sentence without tokens, such as a text that is empty, belongs to the chunk that it lies in.
    """
    sentences = np.arange(bounds[0], bounds[-1])
    documents = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    stretch = (starts[sentences] - starts[bounds[:-1]][documents]) // budget
    fresh = np.ones(len(sentences), dtype=bool)
    fresh[1:] = (documents[1:] != documents[:-1]) | (stretch[1:] != stretch[:-1])
    first = np.flatnonzero(fresh)
    ends = np.append(first[1:], len(sentences))
    kept = ends - first > 1
    return np.stack((sentences[first][kept], ends[kept] + bounds[0], documents[first][kept]), 1)


def truncate(
    first: NDArray[np.int64], second: NDArray[np.int64], most: int, draws: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Truncate two texts to `most` tokens together, as BERT does: the longer of the two, and the second of equal ones,
    loses a token again and again, at its start or at its end with equal probability."""
    excess = len(first) + len(second) - most
    if excess <= 0:
        return first, second
    apart = len(first) - len(second)
    alone = min(abs(apart), excess)
    even = excess - alone
    # After the longer one has lost its excess the two lose in turn, beginning with the second.
    lost = (alone * (apart > 0) + even // 2, alone * (apart < 0) + (even + 1) // 2)
    texts = []
    for text, count in zip((first, second), lost, strict=True):
        front = int(draws.binomial(count, 0.5))
        texts.append(text[front : len(text) - (count - front)])
    return texts[0], texts[1]
