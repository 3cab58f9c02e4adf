"""Prepared data: its folder, manifest, splits and the tokenizer that wrote it."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus.labels import LABELS, NO_TAG, decode_labels
from xscale.data.corpus.manifest import MANIFEST, DatasetManifest, labels_of_manifest
from xscale.data.indexed import IndexedDataset, checked_windows, suffixed
from xscale.data.source.source import SOURCES, Labels
from xscale.data.tokenizer.tokenizer import TOKENIZERS, Tokenizer


@dataclass(frozen=True)
class Split:
    """Documents [first, stop) of a .bin/.idx pair: `train` or `validation`."""

    name: str
    indexed: IndexedDataset
    first: int
    stop: int
    labels: IndexedDataset | None = None
    """The labels of labelled examples; None: there are none."""

    @property
    def tokens(self) -> NDArray[Any]:
        """All tokens end to end, memory-mapped, [N]."""
        starts = self.indexed.starts
        return self.indexed.tokens[starts[self.first] : starts[self.stop]]

    @property
    def starts(self) -> NDArray[np.int64]:
        """Offset of each document in `tokens`, and the end, [documents + 1]."""
        starts = self.indexed.starts[self.first : self.stop + 1]
        shifted: NDArray[np.int64] = starts - starts[0]
        return shifted

    @property
    def pair_lengths(self) -> NDArray[np.int64]:
        """Tokens of the source and of the target of each document of pairs, [documents, 2]."""
        first, stop = self.indexed.bounds[[self.first, self.stop]]
        lengths: NDArray[np.int64] = np.diff(
            self.indexed.sequence_starts[first : stop + 1]
        ).reshape(-1, 2)
        return lengths

    @property
    def documents(self) -> int:
        return self.stop - self.first

    def texts(self, tokenizer: Tokenizer) -> Iterator[bytes]:
        """Yield the UTF-8 text of each document."""
        table = tokenizer.token_bytes()
        for index in range(self.first, self.stop):
            yield b"".join(map(table.__getitem__, self.indexed.document(index).tolist()))

    def target_texts(self, tokenizer: Tokenizer) -> Iterator[bytes]:
        """Yield the UTF-8 text of the target of each document of pairs."""
        table, indexed = tokenizer.token_bytes(), self.indexed
        for index in range(self.first, self.stop):
            first, stop = (
                indexed.sequence_starts[indexed.bounds[index] + 1],
                indexed.starts[index + 1],
            )
            yield b"".join(map(table.__getitem__, indexed.tokens[first:stop].tolist()))

    def bytes(self, tokenizer: Tokenizer) -> int:
        """Count the UTF-8 bytes of the split, by its tokens."""
        lengths = tokenizer.byte_lengths()
        block = 1 << 24
        tokens = self.tokens
        return sum(
            int(lengths[tokens[at : at + block]].sum()) for at in range(0, len(tokens), block)
        )


@dataclass(frozen=True)
class PreparedData:
    """Tokenised data for training and validation."""

    path: Path
    tokenizer: Tokenizer
    train: Split
    validation: Split | None
    """None when the config has no validation split."""
    manifest: DatasetManifest | None
    """None for a pair written by another program."""

    @property
    def pairs(self) -> bool:
        """Whether each document is a source and a target."""
        return self.manifest is not None and self.manifest.pairs

    @property
    def labels(self) -> Labels | None:
        """The labels of labelled examples; None: there are none."""
        return None if self.manifest is None else labels_of_manifest(self.manifest)

    @property
    def records(self) -> Literal["text", "pairs", "labels"]:
        """Content of a document, as the trait of sources."""
        return "pairs" if self.pairs else "labels" if self.labels is not None else "text"


def prepared_folder(config: DataConfig) -> Path:
    """Return the folder for this source, tokenizer and validation fraction; other choices have other folders."""
    source = SOURCES.build(config.source)
    tokenizer = TOKENIZERS.of(config.tokenizer).part.identity(config.tokenizer)
    choice: list[Any] = [source.identity(), tokenizer, config.validation]
    # Data of other samples keeps the folder that it had before there were sentences.
    choice += ["sentences"] * config.split_sentences
    key = hashlib.blake2b(json.dumps(choice, sort_keys=True).encode(), digest_size=5).hexdigest()
    return Path(config.folder) / f"{config.source.kind}-{config.tokenizer.kind}-{key}"


def open_tokenizer(config: DataConfig) -> Tokenizer:
    """Open the tokenizer of the config; ConfigError when it has to be trained first."""
    if config.prepared is None and not config.blend:
        folder = prepared_folder(config)
    else:
        path = Path(config.blend[0].prepared if config.prepared is None else config.prepared)
        folder = path.parent if suffixed(path, ".idx").exists() and not path.is_dir() else path
    tokenizer: Tokenizer = TOKENIZERS.build(config.tokenizer, folder)
    return tokenizer


def begin_differs(tokenizer: Tokenizer, fingerprint: str) -> tuple[str, str] | None:
    """Return (what, fix) where documents with `fingerprint` have the tokenizer's ids without its begin; else None."""
    if fingerprint != tokenizer.text_fingerprint or not tokenizer.prefix:
        return None
    begin = " ".join(map(tokenizer.piece, tokenizer.prefix))
    what = f"the documents were written without {begin} before each, and the tokenizer begins a text with it"
    return (
        what,
        "To go on without it set data.tokenizer.add_bos=false; else prepare the data in another folder.",
    )


def open_prepared(config: DataConfig) -> PreparedData:
    """Open prepared data, read only; any number of processes may. ConfigError when it is missing or incomplete.

    The data is `config.prepared` if given, else what `prepare` made of `config.source`. See `data.blend` for blends.
    """
    path = Path(config.prepared) if config.prepared is not None else prepared_folder(config)
    return open_prepared_at(config, path)


def open_prepared_at(config: DataConfig, path: Path) -> PreparedData:
    """Open the dataset at `path`: a folder with a manifest, or the prefix of a .bin/.idx pair."""
    if config.prepared is not None and not path.is_dir() and suffixed(path, ".idx").exists():
        return _open_pair(config, path)
    manifest = DatasetManifest.load(path / MANIFEST)
    if (kind := manifest.tokenizer.get("kind")) != config.tokenizer.kind:
        what = f"the data was written with the tokenizer '{kind}', not '{config.tokenizer.kind}'"
        raise ConfigError(
            str(path / MANIFEST),
            what,
            "Set data.tokenizer to that kind, or prepare the data again.",
        )
    tokenizer: Tokenizer = TOKENIZERS.build(config.tokenizer, path)
    if tokenizer.fingerprint != manifest.fingerprint:
        if (begin := begin_differs(tokenizer, manifest.fingerprint)) is not None:
            raise ConfigError(str(path / MANIFEST), *begin)
        what = f"the data was written with another tokenizer ({kind} {manifest.fingerprint})"
        fix = f"The config's is {config.tokenizer.kind} {tokenizer.fingerprint}: choose the one of the manifest, "
        raise ConfigError(
            str(path / MANIFEST), what, fix + "or prepare the data again in another folder."
        )
    splits: dict[str, Split] = {}
    for name, counts in manifest.counts.items():
        indexed = IndexedDataset(path / name)
        if (len(indexed), len(indexed.tokens)) != (counts.documents, counts.tokens):
            what = f"it has {len(indexed)} documents with {len(indexed.tokens)} tokens, but the manifest says"
            what += f" {counts.documents} with {counts.tokens}"
            raise ConfigError(str(indexed.idx), what, f"Remove {path} and prepare the data again.")
        if manifest.pairs and not _are_pairs(indexed):
            what = "its documents are not a source and a target each, as the manifest says"
            raise ConfigError(str(indexed.idx), what, f"Remove {path} and prepare the data again.")
        check_sampled_ids(indexed, tokenizer.vocabulary)
        column = _open_labels(path, name, indexed, manifest)
        splits[name] = Split(name, indexed, 0, len(indexed), column)
    return PreparedData(path, tokenizer, splits["train"], splits.get("validation"), manifest)


def _are_pairs(indexed: IndexedDataset) -> bool:
    """Whether the documents are two sequences each; of a large index where it is checked at all."""
    bounds = indexed.bounds
    return all(
        np.array_equal(bounds[part], 2 * np.arange(part.start, part.stop))
        for part in checked_windows(len(bounds))
    )


def _open_labels(
    path: Path, name: str, indexed: IndexedDataset, manifest: DatasetManifest
) -> IndexedDataset | None:
    """Open the labels of a split; None: the data has none. ConfigError where they are not those of its documents."""
    labels = labels_of_manifest(manifest)
    if labels is None:
        return None
    column = IndexedDataset(path / f"{name}{LABELS}")
    lengths = (
        np.diff(indexed.starts) if labels.kind == "tags" else np.ones(len(indexed), dtype=np.int64)
    )
    sequences = np.diff(indexed.bounds)
    if (
        not np.array_equal(np.diff(column.starts), lengths)
        or not (sequences == 1 + labels.pairs).all()
    ):
        what = "its labels are not those of the examples, as the manifest says"
        raise ConfigError(str(column.idx), what, f"Remove {path} and prepare the data again.")
    values = decode_labels(column.tokens, labels)
    is_class = (values >= 0) & (values < len(labels.names)) | (
        (values == NO_TAG) & (labels.kind == "tags")
    )
    if labels.kind != "score" and not is_class.all():
        what = f"it has a label that is none of the {len(labels.names)} classes of the manifest"
        raise ConfigError(str(column.bin), what, f"Remove {path} and prepare the data again.")
    return column


def check_sampled_ids(
    indexed: IndexedDataset, vocabulary: int, blocks: int = 64, length: int = 4096
) -> None:
    """Raise ConfigError where one of `blocks` evenly spaced blocks of `length` tokens has an id of no token.

    It finds data of another tokenizer before a run starts, in milliseconds; `verify.verify` reads all tokens.
    """
    last = max(0, len(indexed.tokens) - length)
    for start in sorted({last * number // max(1, blocks - 1) for number in range(blocks)}):
        check_ids(indexed, vocabulary, start, start + length)


def check_ids(indexed: IndexedDataset, vocabulary: int, start: int, stop: int) -> int:
    """Return the largest id among the tokens [start, stop), -1: no tokens; ConfigError for one of no token."""
    tokens = indexed.tokens[start:stop]
    least, largest = (int(tokens.min()), int(tokens.max())) if len(tokens) else (0, -1)
    if largest >= vocabulary or least < 0:
        bad = largest if largest >= vocabulary else least
        what = f"the data contains token {bad}, but the tokenizer's vocabulary is {vocabulary}"
        raise ConfigError(
            str(indexed.bin), what, "Use the tokenizer with which the data was written."
        )
    return largest


def _open_pair(config: DataConfig, prefix: Path) -> PreparedData:
    """Open a pair without manifest: its last documents are the validation split."""
    tokenizer: Tokenizer = TOKENIZERS.build(config.tokenizer, prefix.parent)
    indexed = IndexedDataset(prefix)
    check_sampled_ids(indexed, tokenizer.vocabulary)
    held_out = round(len(indexed) * config.validation)
    if config.validation and not held_out:
        held_out = 1
    if len(indexed) - held_out < 1:
        what = f"{len(indexed)} documents cannot be split into train and validation"
        raise ConfigError(
            str(indexed.idx), what, "Set data.validation to 0, or give data of more documents."
        )
    train = len(indexed) - held_out
    validation = Split("validation", indexed, train, len(indexed)) if held_out else None
    return PreparedData(prefix, tokenizer, Split("train", indexed, 0, train), validation, None)
