"""Merge finished shards into the files of each split."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from xscale.core.config import encode
from xscale.core.errors import ConfigError, counted
from xscale.core.files.atomic_write import reporting_full_disk
from xscale.data.config import DataConfig
from xscale.data.corpus.corpus_state import state_of
from xscale.data.corpus.manifest import MANIFEST, Counts, DatasetManifest
from xscale.data.corpus.prepared import open_tokenizer, prepared_folder
from xscale.data.corpus.shards import (
    BLOCK,
    SPLITS,
    LowestHash,
    ShardSummary,
    columns_of,
    corpus_hash,
    labels_of,
    plan_shards,
    sequences_of,
    shard_key,
    shard_prefix,
)
from xscale.data.indexed import IndexedDataset, IndexedWriter, token_type
from xscale.data.source.files import line_at
from xscale.data.source.source import (
    SOURCES,
    ByteRange,
    SkippedDocuments,
    Source,
)
from xscale.data.tokenizer.tokenizer import Tokenizer


def merge_shards(config: DataConfig) -> DatasetManifest:
    """Concatenate the finished shards, in order, into `train` and `validation`, and write the manifest.

    The result has the same bytes however the shards were made. ConfigError when a shard or all text is missing.
    """
    folder = prepared_folder(config)
    tokenizer = open_tokenizer(config)
    source: Source = SOURCES.build(config.source)
    planned = plan_shards(config, source)
    shards = [
        _finished(folder / "shards" / f"{number:05d}.json", tokenizer, ranges)
        for number, ranges in enumerate(planned)
    ]
    skipped = _check_skipped(config, shards)
    moved = _moved_document(config, shards)
    names = SPLITS if config.validation else SPLITS[:1]
    counts: dict[str, Counts] = {}
    hashes: dict[str, str] = {}
    for name in names:
        for suffix, dtype, sequences in [
            ("", token_type(tokenizer.vocabulary), sequences_of(config)),
            *columns_of(config),
        ]:
            writer = IndexedWriter(folder / f"{name}{suffix}", dtype, sequences)
            try:
                _join(config, writer, name, suffix, len(shards), moved)
                if not suffix:
                    counts[name] = Counts(
                        writer.documents, writer.tokens, _bytes(shards, name, moved)
                    )
                hashes |= writer.finish()
            except BaseException:
                writer.discard()
                raise
    ranges = [part for shard_ranges in planned for part in shard_ranges]
    manifest = DatasetManifest(
        source=source.identity(),
        corpus=corpus_hash(ranges),
        state=asdict(state_of(ranges)),
        read_files=len({part.file for part in ranges}),
        left_out=source.left_out.entry(),
        tokenizer=encode(config.tokenizer),
        fingerprint=tokenizer.fingerprint,
        vocabulary=tokenizer.vocabulary,
        validation=config.validation,
        counts=counts,
        files=hashes,
        skipped=skipped,
        unknown=_sum_of_known([shard.unknown for shard in shards]),
        sentences=sequences_of(config) is None,
        pairs=SOURCES.of(config.source).traits.records == "pairs",
        labels={} if (labels := labels_of(config)) is None else asdict(labels),
    )
    with reporting_full_disk(folder / MANIFEST):
        manifest.save(folder / MANIFEST)
    return manifest


def _finished(file: Path, tokenizer: Tokenizer, ranges: list[ByteRange]) -> ShardSummary:
    """The summary of a shard of these ranges. ConfigError where it is missing."""
    shard = ShardSummary.load(file, shard_key(tokenizer, ranges), ranges)
    if shard is None:
        what = "this shard is not finished, or the corpus changed meanwhile"
        fix = "Run `xscale data prepare` again: it resumes from the finished shards."
        raise ConfigError(str(file), what, fix)
    return shard


def unknown_sentence(manifest: DatasetManifest) -> str:
    """Say which share of the tokens is unknown; empty where that is not known."""
    tokens = sum(counts.tokens for counts in manifest.counts.values())
    return (
        ""
        if manifest.unknown is None or not tokens
        else f"unknown tokens: {100 * manifest.unknown / tokens:.3g} %"
    )


def _sum_of_known(counts: Sequence[int | None]) -> int | None:
    """Add up the counts; None where one is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _check_skipped(config: DataConfig, shards: list[ShardSummary]) -> dict[str, Any]:
    """Return what the manifest says of skipped documents; ConfigError when they are too many."""
    skipped = SkippedDocuments()
    for shard in shards:
        skipped.extend(shard.skipped)
    read = sum(counts.documents for shard in shards for counts in shard.counts.values())
    return check_skipped(config.source, skipped, read)


def check_skipped(source: Source.Config, skipped: SkippedDocuments, read: int) -> dict[str, Any]:
    """Return number, reasons and first lines of the documents that were skipped beside `read` good ones; empty: none.

    ConfigError when they are more than the source allows.
    """
    if not skipped.count:
        return {}
    entry = {
        "documents": skipped.count,
        "reasons": dict(sorted(skipped.reasons.items())),
        "first": [
            f"{file}:{line_at(file, offset)}: {reason}" for file, offset, reason in skipped.first
        ],
    }
    fraction, limit = (
        skipped.count / (read + skipped.count),
        getattr(source, "max_bad_fraction", 1.0),
    )
    if fraction > limit:
        what = f"{skipped_sentence(entry)}. That is {fraction:.2%} of them, more than max_bad_fraction={limit:g} allows"
        raise ConfigError(
            "data.source.bad", what, "Mend the corpus, or raise data.source.max_bad_fraction."
        )
    return entry


def skipped_sentence(entry: dict[str, Any]) -> str:
    """Describe the skipped documents of a manifest."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in entry["reasons"].items())
    return f"{entry['documents']} documents are bad and were skipped ({reasons}); first: {'; '.join(entry['first'])}"


def _moved_document(
    config: DataConfig, shards: list[ShardSummary]
) -> tuple[int, LowestHash] | None:
    """(shard, document) that moves from train to validation because the validation split is empty."""
    train = sum(shard.counts["train"].documents for shard in shards)
    validation = sum(shard.counts["validation"].documents for shard in shards)
    path = "data.source"
    if train + validation == 0:
        raise ConfigError(
            path, "the corpus has no text: every document is blank", "Name files that contain text."
        )
    if train == 0 or (train == 1 and validation == 0 and config.validation):
        documents = counted(train + validation, "document")
        what = f"{documents} cannot be split into train and validation"
        fix = "Give more documents, split them finer (data.source.document: paragraph), or set data.validation to 0."
        raise ConfigError(path, what, fix)
    if validation or not config.validation:
        return None
    hashes = [(shard.least.place, number) for number, shard in enumerate(shards) if shard.least]
    number = min(hashes)[1]
    least = shards[number].least
    assert least is not None
    return number, least


def _join(
    config: DataConfig,
    writer: IndexedWriter,
    name: str,
    suffix: str,
    shards: int,
    moved: tuple[int, LowestHash] | None,
) -> None:
    """Write what the shards have of the split `name`, or of the column beside it with that suffix."""
    for number in range(shards):
        prefix = shard_prefix(config, number)
        part = IndexedDataset(prefix.with_name(f"{prefix.name}.{name}{suffix}"))
        lengths, counts = np.diff(part.sequence_starts).astype(np.int32), np.diff(part.bounds)
        if moved is None or moved[0] != number:
            for at in range(0, len(part.tokens), BLOCK):
                writer.extend(part.tokens[at : at + BLOCK], lengths[:0], counts[:0])
            writer.extend(part.tokens[:0], lengths, counts)
            continue
        index = moved[1].document
        train = IndexedDataset(prefix.with_name(f"{prefix.name}.train{suffix}"))
        first, stop = (int(train.bounds[at]) for at in (index, index + 1))
        if name == "validation":
            moved_lengths = np.diff(train.sequence_starts[first : stop + 1]).astype(np.int32)
            writer.extend(
                train.document(index), moved_lengths, np.diff(train.bounds)[index : index + 1]
            )
        else:
            writer.extend(train.tokens[: train.starts[index]], lengths[:first], counts[:index])
            writer.extend(
                train.tokens[train.starts[index + 1] :], lengths[stop:], counts[index + 1 :]
            )


def _bytes(shards: list[ShardSummary], name: str, moved: tuple[int, LowestHash] | None) -> int:
    shift = 0 if moved is None else moved[1].bytes if name == "validation" else -moved[1].bytes
    return sum(shard.counts[name].bytes for shard in shards) + shift
