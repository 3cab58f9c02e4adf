"""Data augmentation of TinyBERT (Jiao et al. 2020, algorithm 1): new texts in which other words replace some.

For each new text x_m of a text x, and for each word x[i] in order, with probability p_t x_m[i] becomes one of K
candidates, each as likely as the others:

    x[i] is a single piece    the K most probable words of a masked language model, which reads x_m with x_m[i] masked
    otherwise                 the K words whose vectors are the nearest to that of x[i]

A word that is not replaced is unmasked again. Each text of a pair is a text of its own. Draws depend on the seed and on
the numbers of example, text and copy alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from xscale.data.tokenizer.tokenizer import Tokenizer
from xscale_tinybert.word_vectors import WordVectors
from xscale_tinybert.words import WordText, WordVocabulary

Context = Literal["augmented", "original"]


@dataclass(frozen=True)
class Augmentation:
    """Settings of the augmentation; the defaults are the paper's."""

    copies: int = 20
    """N_a, the new texts of each text."""
    probability: float = 0.4
    """p_t, with which a word is replaced."""
    candidates: int = 15
    """K."""
    seed: int = 0
    context: Context = "augmented"
    """The text in which the masked model reads a word. augmented: x_m, with the words that are replaced so far;
    original: x, so that the copies of a text share the candidates (the authors' code)."""


@dataclass(frozen=True)
class MaskedWord:
    """A query to a masked language model: which tokens are the most probable ones at a position."""

    ids: tuple[int, ...]
    """[T], with the mask token at the position."""
    position: int
    allowed: NDArray[np.int64]
    """Tokens among which the most probable ones are taken."""


FillMasks = Callable[[Sequence[MaskedWord], int], list[list[int]]]
"""Returns the K most probable allowed tokens of each query, or all where they are fewer, in ascending order of ids."""


@dataclass(frozen=True)
class NumberedText:
    """A text with the number of its example, and its number in the example."""

    example: int
    number: int
    text: str


@dataclass(frozen=True)
class ModelInput:
    """The tokens that a masked model reads of a text."""

    begin: tuple[int, ...]
    """Tokens before the text, such as [CLS]."""
    mask: int
    end: tuple[int, ...]
    """Tokens after the text, such as [SEP]."""
    window: int
    """Tokens that the model reads at most: those around the masked one."""

    def masked(self, ids: Sequence[int], index: int) -> tuple[tuple[int, ...], int]:
        """Return what the model reads of a text's ids with token `index` masked, and where that is."""
        tokens = [*self.begin, *ids, *self.end]
        position = len(self.begin) + index
        tokens[position] = self.mask
        first = max(0, min(position - self.window // 2, len(tokens) - self.window))
        return tuple(tokens[first : first + self.window]), position - first


@dataclass
class _Copy:
    """A new text on its way: x_m."""

    original: WordText
    text: WordText
    draws: NDArray[np.float64]
    """[words, 2]: whether each word is replaced, and by which candidate."""


@dataclass
class WordCounts:
    """Words of new texts, by what became of them."""

    kept: int = 0
    by_model: int = 0
    by_vectors: int = 0
    without_vector: int = 0
    """Words of several pieces that were to be replaced, and stayed for want of a vector."""


@dataclass
class Augmenter:
    """Writes new texts; many at once, so that the masked model gets batches."""

    tokenizer: Tokenizer
    reads: ModelInput
    fill_masks: FillMasks
    vectors: WordVectors | None
    """None: words of several pieces stay."""
    settings: Augmentation
    counts: WordCounts = field(default_factory=WordCounts)

    def __post_init__(self) -> None:
        self.vocabulary = WordVocabulary(self.tokenizer)

    def augment(self, texts: Sequence[NumberedText]) -> list[list[str]]:
        """Return the new texts of each text. They do not depend on which texts are given together."""
        rows = [[self._copy(text, copy) for copy in range(self.settings.copies)] for text in texts]
        copies = [copy for row in rows for copy in row]
        for index in range(max((len(copy.text.words) for copy in copies), default=0)):
            longer = [copy for copy in copies if index < len(copy.text.words)]
            chosen = [copy for copy in longer if copy.draws[index, 0] <= self.settings.probability]
            self.counts.kept += len(longer) - len(chosen)
            for copy, candidates in zip(chosen, self._candidates(chosen, index), strict=True):
                if candidates:
                    copy.text.words[index] = candidates[int(copy.draws[index, 1] * len(candidates))]
        return [[str(copy.text) for copy in row] for row in rows]

    def _copy(self, text: NumberedText, copy: int) -> _Copy:
        original = WordText.split(text.text)
        generator = np.random.default_rng([self.settings.seed, text.example, text.number, copy])
        draws = generator.random((len(original.words), 2))
        return _Copy(original, WordText(list(original.words), original.gaps), draws)

    def _candidates(self, copies: Sequence[_Copy], index: int) -> Iterator[list[str]]:
        """Yield the candidates for word `index` of each of the copies."""
        # Copies whose earlier words are the same have the same query; so have all of them in the original's context.
        read = [
            copy.text if self.settings.context == "augmented" else copy.original for copy in copies
        ]
        texts = [str(text) for text in read]
        by_text = dict(zip(texts, read, strict=True))
        queries = {text: self._query(text, words.span(index)) for text, words in by_text.items()}
        masked = {text: query for text, query in queries.items() if query is not None}
        answers = self.fill_masks(list(masked.values()), self.settings.candidates) if masked else []
        filled = dict(zip(masked, answers, strict=True))
        for text, words in zip(texts, read, strict=True):
            if text in filled:
                self.counts.by_model += 1
                yield [self.vocabulary.words[token] for token in filled[text]]
            else:
                word = words.words[index]
                near = (
                    []
                    if self.vectors is None
                    else self.vectors.nearest(word, self.settings.candidates)
                )
                self.counts.by_vectors += bool(near)
                self.counts.without_vector += not near
                yield near

    def _query(self, text: str, span: tuple[int, int]) -> MaskedWord | None:
        """Return the query for the word of the characters `span`; None: it is not a single piece."""
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        start, stop = span
        tokens = [
            number for number, (first, last) in enumerate(offsets) if first < stop and last > start
        ]
        if len(tokens) != 1 or ids[tokens[0]] not in self.vocabulary.forms:
            return None
        first, last = offsets[tokens[0]]
        if text[first:last].strip() != text[start:stop]:
            return None
        read, position = self.reads.masked(ids, tokens[0])
        return MaskedWord(read, position, self.vocabulary.forms[ids[tokens[0]]])
