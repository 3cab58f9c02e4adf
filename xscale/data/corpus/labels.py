"""The labels of labelled examples, in a column beside the tokens."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xscale.data.source.source import Document, Labels
from xscale.data.tokenizer.tokenizer import Tokenizer

LABELS = ".labels"
"""Suffix of the pair of files with the labels of a split: a document there is an example's label, or has a tag for each
of its tokens."""
NO_TAG = -100
"""Tag of a token that is not the first of a word."""


def label_type(labels: Labels) -> Any:
    """Return the dtype in which labels are stored; a score is stored as the bits of a float64."""
    return np.int64 if labels.kind == "score" else np.int32


def decode_labels(stored: NDArray[Any], labels: Labels) -> NDArray[Any]:
    """Return stored labels [N] as float64 scores, or as int64 numbers of classes or tags."""
    return stored.view(np.float64) if labels.kind == "score" else stored.astype(np.int64)


def encode_labelled(document: Document, tokenizer: Tokenizer) -> tuple[list[list[int]], list[int]]:
    """Return the sequences of an example's one or two texts, each with its end, and its labels.

    The objective writes the token before the first text. With tags the text is encoded word by word, and the first
    token of a word has its tag (Devlin et al. 2019, section 5.3).
    """
    if not isinstance(document.label, tuple):
        assert document.label is not None, f"{document.name} has no label"
        label = (
            np.float64(document.label).view(np.int64)
            if isinstance(document.label, float)
            else document.label
        )
        texts = [document.text] if document.second is None else [document.text, document.second]
        return [[*tokenizer.encode(text), tokenizer.eos] for text in texts], [int(label)]
    tokens: list[int] = []
    tags: list[int] = []
    for number, (word, tag) in enumerate(
        zip(document.text.split(" "), document.label, strict=True)
    ):
        pieces = tokenizer.encode(word if number == 0 else f" {word}")
        tokens += pieces
        tags += [tag, *[NO_TAG] * (len(pieces) - 1)][: len(pieces)]
    return [[*tokens, tokenizer.eos]], [*tags, NO_TAG]
