"""Sources of documents."""

from xscale.data.source import (
    hub,
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
    "hub",
    "jsonl",
    "labelled",
    "pairs",
    "parquet",
    "stdlib",
    "stdlib_labelled",
    "stdlib_pairs",
    "text",
]
