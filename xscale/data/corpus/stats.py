"""Statistics of prepared data: lengths, token frequencies and duplicates of each split, counted in one pass."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xscale.data.corpus.histogram import length_rows
from xscale.data.corpus.prepared import Split, check_ids
from xscale.data.indexed import IndexedDataset
from xscale.data.tokenizer.tokenizer import Tokenizer

BLOCK = 1 << 22
"""Tokens that are read at a time."""
MOST_FREQUENT = 10
LARGEST_VOCABULARY = 1 << 24
"""Bound of ids where the tokenizer, and so its vocabulary, is not known."""

Advance = Callable[[int], None]
"""Is called with the number of bytes that were read."""


@dataclass(frozen=True)
class TokenFrequency:
    """One of the most frequent tokens."""

    id: int
    text: str | None
    """The decoded text, the name of a token without text, or None where the tokenizer is not known."""
    count: int
    share: float
    """Share of all tokens of the split."""


@dataclass(frozen=True)
class TokensPerDocument:
    """Lengths of documents in tokens, each with its end-of-document tokens."""

    mean: float
    median: float
    p90: int
    """The least length that 90 % of the documents do not exceed."""
    p99: int
    max: int


@dataclass(frozen=True)
class SplitStatistics:
    """Facts of one split. Shares are between 0 and 1, and None where they are not known or nothing is there."""

    name: str
    documents: int
    tokens: int
    """With the end-of-document tokens."""
    bytes: int | None
    """UTF-8 bytes of the text; None where neither a manifest nor a tokenizer gives them."""
    bytes_per_token: float | None
    tokens_per_document: TokensPerDocument | None
    histogram: list[tuple[int, int, int]]
    """Documents by powers of two of their tokens: (least, most, documents)."""
    longer: float | None
    """Documents longer than a sample: than data.sequence_length, and of pairs and labelled examples truncated ones."""
    padding: float | None
    """Padding among the tokens of an epoch; None where documents are packed, or no recipe is given."""
    vocabulary: int | None
    distinct_tokens: int
    """Ids of the vocabulary that occur."""
    most_frequent: list[TokenFrequency]
    duplicates: int
    """Documents with exactly the tokens of an earlier one of the split."""
    duplicate_share: float | None
    repeated_from_train: int | None
    """Documents with exactly the tokens of one of the train split; None for the train split."""
    unknown: float | None
    """Unknown tokens among all tokens; None where the tokenizer has no such token."""


@dataclass(frozen=True)
class Counted:
    """The result of one pass over the tokens of a split."""

    counts: NDArray[np.int64]
    """Occurrences of each id."""
    hashes: NDArray[np.uint64]
    """Hash of the ids of each document [documents]."""


def count_tokens(split: Split, vocabulary: int | None, advance: Advance) -> Counted:
    """Read the tokens of a split block by block; ConfigError for an id outside the vocabulary.

    Memory beside a block: 8 bytes for each id and each document. A pair of different documents has the same hash with
    the probability 2^-64.
    """
    indexed, starts = split.indexed, split.starts
    offset, total = int(indexed.starts[split.first]), int(starts[-1])
    counts = np.zeros(vocabulary or 0, dtype=np.int64)
    digests: list[bytes] = []
    state = hashlib.blake2b(digest_size=8)
    # At least one block, so that empty documents of an empty split are counted.
    for begin in range(0, max(1, total), BLOCK):
        end = min(begin + BLOCK, total)
        check_ids(indexed, vocabulary or LARGEST_VOCABULARY, offset + begin, offset + end)
        tokens = indexed.tokens[offset + begin : offset + end].astype("<i4")
        block_counts = np.bincount(tokens, minlength=len(counts))
        block_counts[: len(counts)] += counts
        counts = block_counts
        view, at = memoryview(tokens.tobytes()), 0
        complete = int(np.searchsorted(starts[1:], end, side="right"))
        for stop in (4 * (starts[1 + len(digests) : 1 + complete] - begin)).tolist():
            state.update(view[at:stop])
            digests.append(state.digest())
            state, at = hashlib.blake2b(digest_size=8), stop
        state.update(view[at:])
        advance((end - begin) * indexed.tokens.itemsize)
    return Counted(counts, np.frombuffer(b"".join(digests), dtype=np.uint64))


def split_statistics(
    split: Split,
    counted: Counted,
    *,
    tokenizer: Tokenizer | None,
    size: int | None = None,
    longer: float | None = None,
    padding: float | None = None,
    train: Counted | None = None,
) -> SplitStatistics:
    """Compute the facts of a split from its counts.

    `size` is the bytes of its text, None: by its tokens; `train` the counts of the train split, for another split.
    """
    documents = split.documents
    tokens = int(split.starts[-1])
    lengths = np.diff(split.starts)
    if size is None and tokenizer is not None:
        size = int(counted.counts @ tokenizer.byte_lengths())
    has_unknown = tokenizer is not None and tokenizer.has_unknown
    duplicates = documents - len(np.unique(counted.hashes))
    return SplitStatistics(
        name=split.name,
        documents=documents,
        tokens=tokens,
        bytes=size,
        bytes_per_token=None if size is None else ratio(size, tokens),
        tokens_per_document=_tokens_per_document(lengths),
        histogram=length_rows(lengths),
        longer=longer,
        padding=padding,
        vocabulary=None if tokenizer is None else tokenizer.vocabulary,
        distinct_tokens=int(np.count_nonzero(counted.counts)),
        most_frequent=_most_frequent(counted.counts, tokens, tokenizer),
        duplicates=duplicates,
        duplicate_share=ratio(duplicates, documents),
        repeated_from_train=None
        if train is None
        else int(np.isin(counted.hashes, train.hashes).sum()),
        unknown=ratio(int(counted.counts[tokenizer.unk]), tokens)
        if tokenizer is not None and has_unknown
        else None,
    )


def ratio(part: int, total: int) -> float | None:
    """Divide `part` by `total`; None where there is nothing."""
    return part / total if total else None


def whole_pair(indexed: IndexedDataset) -> Split:
    """Return all documents of a pair without manifest, whose splits are those of the config that reads it."""
    return Split("all", indexed, 0, len(indexed))


def _tokens_per_document(lengths: NDArray[Any]) -> TokensPerDocument | None:
    if len(lengths) == 0:
        return None
    p90, p99 = np.percentile(lengths, [90, 99], method="inverted_cdf").tolist()
    return TokensPerDocument(
        float(lengths.mean()), float(np.median(lengths)), int(p90), int(p99), int(lengths.max())
    )


def _most_frequent(
    counts: NDArray[np.int64], tokens: int, tokenizer: Tokenizer | None
) -> list[TokenFrequency]:
    """List the most frequent tokens, the most frequent first, and of equally frequent ones that of the smallest id."""
    order = np.argsort(-counts, kind="stable")[:MOST_FREQUENT]
    table = None if tokenizer is None else tokenizer.token_bytes()
    rows = []
    for token in order[counts[order] > 0].tolist():
        text = None
        if tokenizer is not None and table is not None:
            # Special tokens have no bytes, and those of a part of a character are no text.
            text = table[token].decode("utf-8", errors="ignore") or tokenizer.piece(token)
        rows.append(TokenFrequency(token, text, int(counts[token]), int(counts[token]) / tokens))
    return rows
