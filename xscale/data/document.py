"""One document of a corpus, and the stable place that a document has between train and validation."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Document:
    """A text with a name that is the same however the corpus is read."""

    name: str
    """File, and for a file of many documents the byte at which this one begins: `corpus/a.txt:8192`."""
    text: str


def place(text: str) -> int:
    """A number in [0, 2**64) drawn from the text alone: equal documents never part between train and validation."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")


def validation_below(fraction: float) -> int:
    """Documents whose `place` is below this number are validation."""
    return int(fraction * 2**64)
