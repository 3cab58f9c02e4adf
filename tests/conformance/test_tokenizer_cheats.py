"""Tokenizers that promise what they do not keep."""

from pathlib import Path
from typing import Any

import pytest

from xscale.conformance import tokenizer as suite
from xscale.core.registry import Entry, Family
from xscale.data.tokenizer.tokenizer import Tokenizer, TokenizerTraits, special_tokens


class Letters(Tokenizer):
    """Bytes after the special ids."""

    def __init__(self, config: Any, folder: Path) -> None:
        super().__init__(config, folder)
        self.vocabulary = self.sentinels.stop + 256
        self.fingerprint = "letters"

    def encode(self, text: str) -> list[int]:
        return [self.sentinels.stop + value for value in text.encode("utf-8")]

    def piece(self, token: int) -> str:
        names = special_tokens(self.config.sentinels)
        return names[token] if token < len(names) else chr(token - len(names))

    def token_bytes(self) -> list[bytes]:
        return [b""] * self.sentinels.stop + [bytes([value]) for value in range(256)]


class Lower(Letters):
    def encode(self, text: str) -> list[int]:
        return super().encode(text.lower())


class Believes(Letters):
    """Takes the text `</s>` for the end."""

    def encode(self, text: str) -> list[int]:
        return [2] if text == "</s>" else super().encode(text)


class Speaks(Letters):
    def token_bytes(self) -> list[bytes]:
        return [b"?"] * self.sentinels.stop + super().token_bytes()[self.sentinels.stop :]


def registered(part: type[Tokenizer], *, trained: bool = False) -> Entry[Any]:
    family: Family[TokenizerTraits] = Family("tokenizer", TokenizerTraits)
    family.register("cheat", traits=TokenizerTraits(trained=trained, lossless=True))(type("Cheat", (part,), {}))
    return family.get("cheat")


def gives_back(part: type[Tokenizer], folder: Path, text: str) -> None:
    entry = registered(part)
    suite.gives_back(entry, suite.built(entry, folder), text)


@pytest.mark.parametrize(("cheat", "written"), [(Lower, "Köln"), (Believes, "</s>")])
def test_a_loss_is_caught(cheat: type[Tokenizer], written: str, tmp_path: Path) -> None:
    gives_back(Letters, tmp_path, written)
    with pytest.raises(AssertionError):
        gives_back(cheat, tmp_path, written)


def test_special_ids_that_say_something_are_caught(tmp_path: Path) -> None:
    suite.special_ids_are_first_and_say_nothing(registered(Letters), tmp_path)
    with pytest.raises(AssertionError):
        suite.special_ids_are_first_and_say_nothing(registered(Speaks), tmp_path)


def test_one_that_needs_no_training_and_says_it_does_is_caught(tmp_path: Path) -> None:
    suite.only_what_is_trained_is_missing_before(registered(Letters), tmp_path)
    with pytest.raises(AssertionError):
        suite.only_what_is_trained_is_missing_before(registered(Letters, trained=True), tmp_path)
