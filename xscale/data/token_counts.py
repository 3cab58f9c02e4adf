"""Counts of the token ids of a run's training data, for parts of a model that follow them, such as a balanced hash."""

import numpy as np
from numpy.typing import NDArray

from xscale.data.corpus.prepared import Split, check_ids
from xscale.data.samples.blend import BlendedDataset
from xscale.data.samples.loader import Corpus

BLOCK = 1 << 22
"""Tokens that are read at a time."""
MOST_BLOCKS = 1 << 8
"""Blocks of a larger split that are read, at equal distances."""


def count_training_tokens(corpus: Corpus) -> NDArray[np.float64]:
    """Count each id [V] in the training documents; of a blend, each dataset's counts have the weight of its samples.

    Of a split of more than a billion tokens a billion is read, from its beginning to its end. ConfigError for an id
    outside the vocabulary.
    """
    splits = [prepared.train for prepared in corpus.sets if prepared.train is not None]
    counts = [_count(split, corpus.tokenizer.vocabulary) for split in splits]
    if not isinstance(corpus.train.data, BlendedDataset):
        return counts[0]
    total = sum(count.sum() for count in counts)
    shares = corpus.train.data.shares()
    weighted = [
        count * (share * total / count.sum()) for count, share in zip(counts, shares, strict=True)
    ]
    result: NDArray[np.float64] = np.sum(weighted, axis=0)
    return result


def _count(split: Split, vocabulary: int) -> NDArray[np.float64]:
    counts, tokens = np.zeros(vocabulary, dtype=np.int64), split.tokens
    offset, blocks = int(split.indexed.starts[split.first]), -(-len(tokens) // BLOCK)
    for block in np.unique(
        np.linspace(0, blocks - 1, min(blocks, MOST_BLOCKS)).astype(np.int64)
    ).tolist():
        begin, end = block * BLOCK, min((block + 1) * BLOCK, len(tokens))
        check_ids(split.indexed, vocabulary, offset + begin, offset + end)
        counts += np.bincount(tokens[begin:end], minlength=vocabulary)
    return counts.astype(np.float64)
