"""Conformance of tokenizers: what their traits promise, and what all of them do."""

from pathlib import Path
from typing import Any

import numpy as np

from xscale.conformance.check import check
from xscale.conformance.small_parts import example
from xscale.core.registry import Entry
from xscale.data.tokenizer.tokenizer import Tokenizer, special_tokens

TEXTS = [Path(__file__).read_text(encoding="utf-8"), "Grüße aus Köln.\n"]
HARD = (
    "",
    " ",
    "\n",
    "\r\n",
    "a ▁ 𝄞 ä  b",
    "</s>",
    "<mask><extra_id_0>",
    "\x00\x01",
    "e\u0301 \u200d",
    "ﬁ Å",
)
"""Texts that a normaliser or a special token may change."""


def built(entry: Entry[Any], folder: Path) -> Tokenizer:
    """The tokenizer of the part's example, trained in `folder` if it is one that is trained."""
    config = example(entry)
    if entry.part.missing(config, folder):
        entry.part.train(config, TEXTS, folder)
    tokenizer: Tokenizer = entry.part(config, folder)
    return tokenizer


def gives_back(entry: Entry[Any], tokenizer: Tokenizer, text: str) -> None:
    """A text that was encoded is decoded to itself where that is declared."""
    tokens = tokenizer.encode(text)
    if entry.traits.lossless:
        assert tokenizer.decode(tokens) == text, f"{text!r} is changed"
        assert tokenizer.byte_lengths()[np.array(tokens, dtype=np.int64)].sum() == len(
            text.encode("utf-8")
        )
    assert all(tokenizer.sentinels.stop <= token < tokenizer.vocabulary for token in tokens)


@check("tokenizer")
def only_what_is_trained_is_missing_before(entry: Entry[Any], folder: Path) -> None:
    assert entry.part.missing(example(entry), folder) == entry.traits.trained
    assert (entry.part.sample_bytes(example(entry)) > 0) == entry.traits.trained
    built(entry, folder)
    assert not entry.part.missing(example(entry), folder)
    assert bool(list(folder.iterdir())) == entry.traits.trained


@check("tokenizer")
def training_again_is_the_same_tokenizer(entry: Entry[Any], folder: Path) -> None:
    folders = [folder / "first", folder / "second"]
    for path in folders:
        path.mkdir()
    first, other = (built(entry, path) for path in folders)
    assert first.fingerprint == other.fingerprint
    assert [first.encode(text) for text in TEXTS] == [other.encode(text) for text in TEXTS]


@check("tokenizer", at_start=True)
def what_is_lossless_gives_every_text_back(entry: Entry[Any], folder: Path) -> None:
    tokenizer = built(entry, folder)
    for text in (*TEXTS, *HARD):
        gives_back(entry, tokenizer, text)


@check("tokenizer")
def offsets_are_the_characters_of_each_token(entry: Entry[Any], folder: Path) -> None:
    tokenizer = built(entry, folder)
    table = tokenizer.token_bytes()
    for text in (*TEXTS, "", "a ▁ 𝄞 ä  b"):
        ids, offsets = tokenizer.encode_with_offsets(text)
        assert ids == tokenizer.encode(text)
        assert len(offsets) == len(ids)
        assert {number for start, stop in offsets for number in range(start, stop)} == set(
            range(len(text))
        )
        assert offsets == sorted(offsets)
        if entry.traits.lossless:
            assert b"".join(table[token] for token in ids) == text.encode()
            for token, (start, stop) in zip(ids, offsets, strict=True):
                # A token of some of a character's bytes has the full character.
                assert table[token] in text[start:stop].encode()


@check("tokenizer")
def special_ids_are_first_and_say_nothing(entry: Entry[Any], folder: Path) -> None:
    tokenizer = built(entry, folder)
    names = special_tokens(len(tokenizer.sentinels))
    assert [tokenizer.piece(token) for token in range(len(names))] == names
    assert names[tokenizer.eos] == "</s>"
    assert tokenizer.mask is not None
    assert names[tokenizer.mask] == "<mask>"
    assert tokenizer.sentinels == range(5, len(names))
    assert tokenizer.decode(range(len(names))) == ""
    assert tokenizer.byte_lengths()[: len(names)].sum() == 0
    assert len(tokenizer.token_bytes()) == len(tokenizer.byte_lengths()) == tokenizer.vocabulary
