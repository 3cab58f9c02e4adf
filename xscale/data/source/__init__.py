"""Sources of documents."""

from xscale.data.source import (
    jsonl,
    labelled,
    pairs,
    stdlib,
    stdlib_labelled,
    stdlib_pairs,
    text,
)

__all__ = [
    "jsonl",
    "labelled",
    "pairs",
    "stdlib",
    "stdlib_labelled",
    "stdlib_pairs",
    "text",
]
