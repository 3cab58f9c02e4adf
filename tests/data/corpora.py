"""Small corpora for tests: text that repeats itself little, in as many documents as wanted."""

import random
from pathlib import Path
from typing import Any

from xscale.data.config import DataConfig
from xscale.data.source.text import Text
from xscale.data.tokenizer.byte import Byte


def words(seed: int, count: int) -> str:
    """`count` made-up words, nine to a line."""
    draw = random.Random(seed)
    made = ["".join(draw.choices("aeioubdklmnrst", k=draw.randint(2, 9))) for _ in range(count)]
    return "\n".join(" ".join(made[at : at + 9]) for at in range(0, count, 9)) + "\n"


def text_config(folder: Path, documents: int = 40, count: int = 60, **fields: Any) -> DataConfig:
    """A config for a folder of text files of `count` words or so each, written unless there; bytes as tokens."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for index in range(documents):
        file = corpus / f"{index:03d}.txt"
        if not file.exists():
            file.write_text(words(index, count + index % 7))
    base: dict[str, Any] = {
        "source": Text.Config(paths=(str(corpus),)),
        "tokenizer": Byte.Config(),
        "folder": str(folder / "data"),
        "validation": 0.2,
        "sequence_length": 32,
    }
    return DataConfig(**(base | fields))
