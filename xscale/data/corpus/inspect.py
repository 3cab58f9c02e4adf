"""Summary of prepared data for people: its sizes, the lengths of documents, and some of them decoded."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xscale.data.config import DataConfig
from xscale.data.corpus.histogram import bars, length_rows
from xscale.data.corpus.labels import NO_TAG, decode_labels
from xscale.data.corpus.prepared import PreparedData, Split, open_prepared
from xscale.data.source.listing import left_out_sentence
from xscale.data.source.source import Labels

EXCERPT_CHARACTERS = 400
"""Characters shown of a document."""


def inspect(config: DataConfig, documents: int = 5) -> str:
    """Format a summary with `documents` evenly spaced, decoded training documents. Raises as `open_prepared`."""
    prepared = open_prepared(config)
    tokenizer = prepared.tokenizer
    lines = [f"data        {prepared.path}"]
    lines.append(
        f"tokenizer   {config.tokenizer.kind}, {tokenizer.vocabulary} ids, fingerprint {tokenizer.fingerprint}"
    )
    if prepared.manifest is not None:
        source = ", ".join(f"{key} {value}" for key, value in prepared.manifest.source.items())
        lines.append(f"source      {source}")
        if prepared.manifest.read_files:
            said = left_out_sentence(prepared.manifest.left_out)
            lines.append(
                f"files       {prepared.manifest.read_files:,}" + (f"; {said}" if said else "")
            )
        if skipped := prepared.manifest.skipped:
            lines.append(f"skipped     {skipped['documents']} documents: {skipped['reasons']}")
    for split in (prepared.train, prepared.validation):
        if split is not None:
            lines += _split(prepared, split)
    lines += ["", "tokens per document (training split)", *_lengths(np.diff(prepared.train.starts))]
    count = min(documents, prepared.train.documents)
    for index in np.linspace(0, prepared.train.documents - 1, count, dtype=np.int64).tolist():
        lines += ["", *_document(prepared, index)]
    return "\n".join(lines)


def _split(prepared: PreparedData, split: Split) -> list[str]:
    tokens = len(split.tokens)
    manifest = prepared.manifest
    size = (
        split.bytes(prepared.tokenizer) if manifest is None else manifest.counts[split.name].bytes
    )
    rate = f"{size / tokens:.2f} bytes per token" if tokens else "empty"
    return [
        f"{split.name:<12}{split.documents:,} documents, {tokens:,} tokens, {size:,} bytes, {rate}"
    ]


def _lengths(lengths: NDArray[np.int64]) -> list[str]:
    """Histogram of document lengths and their summary; nothing without documents."""
    if len(lengths) == 0:
        return []
    summary = (
        f"median {np.median(lengths):,.0f}, mean {lengths.mean():,.0f}, longest {lengths.max():,}"
    )
    return [*bars(length_rows(lengths)), summary]


def _document(prepared: PreparedData, index: int) -> list[str]:
    split, tokenizer = prepared.train, prepared.tokenizer
    indexed, number = split.indexed, split.first + index
    tokens = indexed.document(number).tolist()
    text = tokenizer.decode(tokens)
    if prepared.pairs:
        source = int(indexed.sequence_starts[indexed.bounds[number] + 1] - indexed.starts[number])
        text = f"{tokenizer.decode(tokens[:source])}\n=> {tokenizer.decode(tokens[source:])}"
    if prepared.labels is not None:
        assert split.labels is not None
        text += f"\n=> {_label(decode_labels(split.labels.document(number), prepared.labels), prepared.labels)}"
    more = (
        f" ... ({len(text) - EXCERPT_CHARACTERS:,} characters more)"
        if len(text) > EXCERPT_CHARACTERS
        else ""
    )
    pieces = " ".join(repr(tokenizer.piece(token)) for token in tokens[:12])
    return [
        f"--- document {index}: {len(tokens):,} tokens, first {pieces}",
        text[:EXCERPT_CHARACTERS] + more,
    ]


def _label(values: NDArray[Any], labels: Labels) -> str:
    """Format the label of an example: a score, the name of a class, or those of tags."""
    if labels.kind == "score":
        return f"{values[0]:g}"
    return " ".join(labels.names[value] for value in values[values != NO_TAG].tolist())
