"""Sources of documents."""

from xscale.data.source import (
    jsonl,
    labelled,
    pairs,
    parquet,
    stdlib,
    stdlib_labelled,
    stdlib_pairs,
    text,
)

__all__ = [
    "jsonl",
    "labelled",
    "pairs",
    "parquet",
    "stdlib",
    "stdlib_labelled",
    "stdlib_pairs",
    "text",
]
