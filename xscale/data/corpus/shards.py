"""Shards of the corpus, which processes tokenise independently in any order, and their merge into one dataset."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xscale.core.files.atomic_write import reporting_full_disk, write_atomically
from xscale.core.files.file_safety import decode_json, read_regular, remove_file
from xscale.data.config import DataConfig
from xscale.data.corpus.corpus_state import CorpusState, state_of
from xscale.data.corpus.labels import LABELS, encode_labelled, label_type
from xscale.data.corpus.manifest import Counts
from xscale.data.corpus.prepared import open_tokenizer, prepared_folder
from xscale.data.corpus.split_sentences import split_sentences
from xscale.data.indexed import IndexedWriter, token_type
from xscale.data.source.source import (
    SOURCES,
    ByteRange,
    Labels,
    SkippedDocuments,
    Source,
    validation_below,
)
from xscale.data.tokenizer.tokenizer import Tokenizer

MIN_SHARD_BYTES, MAX_SHARD_BYTES, TARGET_SHARDS = 1 << 20, 256 << 20, 64
"""Bounds of a shard's bytes, and the number of shards within them: the split depends on the corpus alone."""
BLOCK = 1 << 24
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class LowestHash:
    """The training document with the lowest hash: it becomes the validation split when that would be empty."""

    place: int
    document: int
    """Index within the shard's training documents."""
    bytes: int


@dataclass(frozen=True)
class ShardSummary:
    """Summary of a finished shard."""

    key: str
    counts: dict[str, Counts]
    least: LowestHash | None
    skipped: SkippedDocuments
    state: CorpusState = field(default_factory=CorpusState)
    """State of its files before they were read."""
    unknown: int | None = None
    """Unknown tokens; None where the tokenizer has no such token."""

    @staticmethod
    def load(file: Path, key: str, ranges: list[ByteRange]) -> "ShardSummary | None":
        """Load the summary; None when the shard is not finished, or was made from another text or tokenizer."""
        try:
            data = decode_json(read_regular(file))
            counts = {name: Counts(**entry) for name, entry in data["counts"].items()}
            least = LowestHash(**data["least"]) if data["least"] else None
            state = CorpusState(**data.get("state", {}))
            unknown = None if data.get("unknown") is None else int(data["unknown"])
            shard = ShardSummary(
                data["key"], counts, least, SkippedDocuments(**data["skipped"]), state, unknown
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        return shard if shard.key == key and shard.state.is_of(ranges) else None


def corpus_hash(ranges: list[ByteRange]) -> str:
    """Hash the names and sizes of the corpus's files."""
    text = "\n".join(f"{part.file}\t{part.start}\t{part.stop}" for part in ranges)
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def plan_shards(config: DataConfig, source: Source | None = None) -> list[list[ByteRange]]:
    """Return the byte ranges of each shard, in order; `source`: one that then has the files that are left out."""
    source = SOURCES.build(config.source) if source is None else source
    ranges = source.byte_ranges()
    size = min(
        MAX_SHARD_BYTES, max(MIN_SHARD_BYTES, sum(part.size for part in ranges) // TARGET_SHARDS)
    )
    shards: list[list[ByteRange]] = [[]]
    used = 0
    for part in ranges:
        if used and used + part.size > size:
            shards.append([])
            used = 0
        shards[-1].append(part)
        used += part.size
    return shards


def sequences_of(config: DataConfig) -> int | None:
    """Return the sequences of a document: two for a pair of a source and a target, and for a labelled pair; None: one
    for each sentence."""
    labels = labels_of(config)
    if SOURCES.of(config.source).traits.records == "pairs" or (labels is not None and labels.pairs):
        return 2
    return None if config.split_sentences else 1


def labels_of(config: DataConfig) -> Labels | None:
    """Return the labels of the source's examples; None: its records have none."""
    labels: Labels | None = SOURCES.of(config.source).part.labels(config.source)
    return labels


def columns_of(config: DataConfig) -> list[tuple[str, Any, int]]:
    """Return (suffix of the file's name, dtype, sequences of a document) of what is stored beside the tokens of each
    split: the labels, if there are any."""
    labels = labels_of(config)
    return [] if labels is None else [(LABELS, label_type(labels), 1)]


def shard_key(tokenizer: Tokenizer, ranges: list[ByteRange]) -> str:
    return f"{tokenizer.fingerprint} {corpus_hash(ranges)}"


def shard_prefix(config: DataConfig, shard: int) -> Path:
    return prepared_folder(config) / "shards" / f"{shard:05d}"


def prepare_shard(config: DataConfig, shard: int, ranges: list[ByteRange] | None = None) -> int:
    """Tokenise one shard of `plan_shards(config)` unless it is finished; return its size on disk. Needs the tokenizer.

    Shards are independent: machines that share the folder may each tokenise some.
    """
    ranges = plan_shards(config)[shard] if ranges is None else ranges
    size = sum(part.size for part in ranges)
    tokenizer = open_tokenizer(config)
    key = shard_key(tokenizer, ranges)
    prefix = shard_prefix(config, shard)
    done = prefix.with_name(f"{prefix.name}.json")
    if ShardSummary.load(done, key, ranges) is not None:
        return size
    remove_file(done.parent, done.name)
    # Before the text is read, so that a change meanwhile is noticed.
    state = state_of(ranges)
    files = [("", token_type(tokenizer.vocabulary), sequences_of(config)), *columns_of(config)]
    writers = {
        f"{name}{suffix}": IndexedWriter(
            prefix.with_name(f"{prefix.name}.{name}{suffix}"), dtype, sequences
        )
        for name in SPLITS
        for suffix, dtype, sequences in files
    }
    try:
        counts, least, skipped, unknown = _tokenise(config, tokenizer, ranges, writers)
        for writer in writers.values():
            writer.finish()
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise
    with reporting_full_disk(done):
        write_atomically(
            done, json.dumps(asdict(ShardSummary(key, counts, least, skipped, state, unknown)))
        )
    return size


def _tokenise(
    config: DataConfig,
    tokenizer: Tokenizer,
    ranges: list[ByteRange],
    writers: dict[str, IndexedWriter],
) -> tuple[dict[str, Counts], LowestHash | None, SkippedDocuments, int | None]:
    source: Source = SOURCES.build(config.source)
    below = validation_below(config.validation)
    totals = {name: [0, 0, 0] for name in SPLITS}
    least: LowestHash | None = None
    unknown = 0 if tokenizer.has_unknown else None
    for byte_range in ranges:
        for document in source.read(byte_range):
            rank = document.split_hash
            name = "validation" if rank < below else "train"
            texts = [
                text
                for text in (document.text, document.target, document.second)
                if text is not None
            ]
            if document.label is not None:
                sequences, labels = encode_labelled(document, tokenizer)
                writers[f"{name}{LABELS}"].add(labels)
            elif config.split_sentences and document.target is None:
                # An objective writes its own tokens before and between sentences.
                sequences = [
                    tokenizer.encode(sentence) for sentence in split_sentences(document.text)
                ]
                sequences[-1].append(tokenizer.eos)
            else:
                sequences = [tokenizer.encode_document(text) for text in texts]
            size = sum(len(text.encode("utf-8")) for text in texts)
            if name == "train" and (least is None or rank < least.place):
                least = LowestHash(rank, totals[name][0], size)
            writers[name].add(*sequences)
            if unknown is not None:
                unknown += sum(sequence.count(tokenizer.unk) for sequence in sequences)
            for index, amount in enumerate((1, sum(map(len, sequences)), size)):
                totals[name][index] += amount
    return {name: Counts(*total) for name, total in totals.items()}, least, source.skipped, unknown
