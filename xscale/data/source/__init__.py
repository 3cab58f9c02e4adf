"""Sources of documents."""

from xscale.data.source import (
    jsonl,
    pairs,
    stdlib,
    stdlib_pairs,
    text,
)

__all__ = [
    "jsonl",
    "pairs",
    "stdlib",
    "stdlib_pairs",
    "text",
]
