"""Bytes as tokens."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from xscale.data.tokenizer.byte import Byte

TOKENIZER = Byte(Byte.Config(), Path())


@given(st.text())
def test_text_comes_back(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert TOKENIZER.decode(tokens) == text
    assert TOKENIZER.byte_lengths()[tokens].sum() == len(text.encode())
    assert not {*tokens} & {*range(TOKENIZER.sentinels.stop)}


def test_ids_are_laid_out() -> None:
    assert (TOKENIZER.pad, TOKENIZER.bos, TOKENIZER.eos, TOKENIZER.unk, TOKENIZER.mask) == (0, 1, 2, 3, 4)
    assert TOKENIZER.sentinels == range(5, 105)
    assert TOKENIZER.vocabulary == 384
    assert len(TOKENIZER.token_bytes()) == len(TOKENIZER.byte_lengths()) == 384
    assert [TOKENIZER.piece(token) for token in (2, 5, 105 + 65, 105 + 200, 383)] == [
        "</s>",
        "<extra_0>",
        "A",
        "<0xC8>",
        "<unused>",
    ]


def test_special_tokens_say_nothing_and_broken_bytes_show() -> None:
    tokens = [TOKENIZER.bos, *TOKENIZER.encode("aé")[:-1], TOKENIZER.eos, 5, 383]
    assert TOKENIZER.decode(tokens) == "a\ufffd"


def test_other_sentinels_are_another_tokenizer() -> None:
    other = Byte(Byte.Config(sentinels=0), Path())
    assert other.fingerprint != TOKENIZER.fingerprint
    assert (other.sentinels, other.vocabulary) == (range(5, 5), 320)
