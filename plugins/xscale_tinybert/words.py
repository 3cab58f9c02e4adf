"""Words of a text, and the tokens of a vocabulary that are whole words."""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xscale.data.tokenizer.tokenizer import Tokenizer

WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
"""A run of letters and digits, with apostrophes inside."""


@dataclass
class WordText:
    """A text as its words and what is between them, before the first and after the last."""

    words: list[str]
    gaps: list[str]

    @classmethod
    def split(cls, text: str) -> "WordText":
        """Split a text at the boundaries of its words."""
        return cls(WORD.findall(text), WORD.split(text))

    def __str__(self) -> str:
        return self.gaps[0] + "".join(
            word + gap for word, gap in zip(self.words, self.gaps[1:], strict=True)
        )

    def span(self, index: int) -> tuple[int, int]:
        """Return the characters [start, stop) of word `index`."""
        start = len(self.gaps[0]) + sum(
            len(word) + len(gap)
            for word, gap in zip(self.words[:index], self.gaps[1:], strict=False)
        )
        return start, start + len(self.words[index])


class WordVocabulary:
    """Tokens of a tokenizer that are whole words, by their form: the spaces in the token before and after the word.

    A token may take the place of another one of its form, so that words stay apart: of " blue" that of " red", and not
    that of "red", which continues a word.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.words: dict[int, str] = {}
        """Token -> its word."""
        self.forms: dict[int, NDArray[np.int64]] = {}
        """Token -> the tokens of its form, in ascending order; those of a form share the array."""
        by_form: dict[tuple[str, str], list[int]] = {}
        for token, data in enumerate(tokenizer.token_bytes()):
            text = data.decode("utf-8", errors="replace")
            word = text.strip()
            if WORD.fullmatch(word):
                before, _, after = text.partition(word)
                self.words[token] = word
                by_form.setdefault((before, after), []).append(token)
        for tokens in by_form.values():
            self.forms |= dict.fromkeys(tokens, np.array(tokens, dtype=np.int64))
