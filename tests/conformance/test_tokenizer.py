"""Every tokenizer: what its traits promise, and what all of them do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.families import each, example, family
from xscale.core.registry import Entry
from xscale.data.tokenizer.tokenizer import Tokenizer, special_tokens

TOKENIZERS = family("tokenizer")
TEXTS = [Path(__file__).read_text(encoding="utf-8"), "Grüße aus Köln.\n"]


def made(entry: Entry[Any], folder: Path) -> Tokenizer:
    config = example(entry)
    if entry.part.missing(config, folder):
        entry.part.train(config, TEXTS, folder)
    tokenizer: Tokenizer = entry.part(config, folder)
    return tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {entry.name: tmp_path_factory.mktemp(entry.name) for entry in TOKENIZERS}


@each(TOKENIZERS)
def test_only_what_is_trained_is_missing_before(entry: Entry[Any], tmp_path: Path) -> None:
    assert entry.part.missing(example(entry), tmp_path) == entry.traits.trained
    assert (entry.part.sample_bytes(example(entry)) > 0) == entry.traits.trained
    made(entry, tmp_path)
    assert not entry.part.missing(example(entry), tmp_path)
    assert bool(list(tmp_path.iterdir())) == entry.traits.trained


@each(TOKENIZERS)
def test_training_again_is_the_same_tokenizer(entry: Entry[Any], folders: dict[str, Path], tmp_path: Path) -> None:
    one, other = made(entry, folders[entry.name]), made(entry, tmp_path)
    assert one.fingerprint == other.fingerprint
    assert [one.encode(text) for text in TEXTS] == [other.encode(text) for text in TEXTS]


@each(TOKENIZERS)
@settings(deadline=None, max_examples=60)
@given(text=st.text() | st.lists(st.sampled_from([*special_tokens(2), " ", "\n", "▁", "a", "\r", "𝄞"])).map("".join))
def test_what_is_lossless_gives_every_text_back(entry: Entry[Any], folders: dict[str, Path], text: str) -> None:
    tokenizer = made(entry, folders[entry.name])
    tokens = tokenizer.encode(text)
    if entry.traits.lossless:
        assert tokenizer.decode(tokens) == text
        assert tokenizer.byte_lengths()[np.array(tokens, dtype=np.int64)].sum() == len(text.encode("utf-8"))
    assert all(tokenizer.sentinels.stop <= token < tokenizer.vocabulary for token in tokens)


@each(TOKENIZERS)
def test_offsets_are_the_characters_of_each_token(entry: Entry[Any], folders: dict[str, Path]) -> None:
    tokenizer = made(entry, folders[entry.name])
    table = tokenizer.token_bytes()
    for text in (*TEXTS, "", "a ▁ 𝄞 ä  b"):
        ids, offsets = tokenizer.encode_with_offsets(text)
        assert ids == tokenizer.encode(text)
        assert len(offsets) == len(ids)
        assert {number for start, stop in offsets for number in range(start, stop)} == set(range(len(text)))
        assert offsets == sorted(offsets)
        if entry.traits.lossless:
            assert b"".join(table[token] for token in ids) == text.encode()
            for token, (start, stop) in zip(ids, offsets, strict=True):
                # A token of some of a character's bytes has the full character.
                assert table[token] in text[start:stop].encode()


@each(TOKENIZERS)
def test_special_ids_are_first_and_say_nothing(entry: Entry[Any], folders: dict[str, Path]) -> None:
    tokenizer = made(entry, folders[entry.name])
    names = special_tokens(len(tokenizer.sentinels))
    assert [tokenizer.piece(token) for token in range(len(names))] == names
    assert names[tokenizer.eos] == "</s>"
    assert names[tokenizer.mask] == "<mask>"
    assert tokenizer.sentinels == range(5, len(names))
    assert tokenizer.decode(range(len(names))) == ""
    assert tokenizer.byte_lengths()[: len(names)].sum() == 0
    assert len(tokenizer.token_bytes()) == len(tokenizer.byte_lengths()) == tokenizer.vocabulary
