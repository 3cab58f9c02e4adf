"""The manifest of prepared data: what it was made from, how, and what is in it."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xscale.core.errors import ConfigError
from xscale.core.files.atomic_write import write_atomically
from xscale.core.files.file_safety import decode_json, read_regular
from xscale.core.foreign import reason
from xscale.data.source.source import Labels

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Counts:
    """Size of a split."""

    documents: int = 0
    tokens: int = 0
    """Including one end-of-document token per document, two per pair."""
    bytes: int = 0
    """UTF-8 bytes of the text."""


@dataclass(frozen=True)
class DatasetManifest:
    """Description of prepared data, written last: a folder with a manifest is complete."""

    source: dict[str, Any]
    corpus: str
    """Hash of the names and sizes of the corpus's files, which detects a changed corpus."""
    tokenizer: dict[str, Any]
    fingerprint: str
    """Fingerprint of the tokenizer."""
    vocabulary: int
    validation: float
    counts: dict[str, Counts]
    """By split: `train` and `validation`."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file."""
    state: dict[str, str] = field(default_factory=dict)
    """Fields of the `CorpusState`, which detects a corpus that was edited in place; empty: it is not known."""
    read_files: int = 0
    """Files of the corpus that were read."""
    left_out: dict[str, list[Any]] = field(default_factory=dict)
    """Files of the corpus's folders and globs that were not read: reason -> number and first names."""
    skipped: dict[str, Any] = field(default_factory=dict)
    """Documents that could not be read: how many, for which reasons, and the first places; empty: none."""
    unknown: int | None = None
    """Unknown tokens of all splits; None where the tokenizer has no such token, and in data of earlier versions."""
    pairs: bool = False
    """Whether each document is a source and a target, each with an end-of-document token."""
    sentences: bool = False
    """Whether each sentence of a document is a sequence; the last one has the end-of-document token."""
    labels: dict[str, Any] = field(default_factory=dict)
    """Fields of the `Labels` of labelled examples, whose column is beside each split; empty: there are none."""

    def save(self, file: Path) -> None:
        write_atomically(file, json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def load(file: Path) -> "DatasetManifest":
        """Read the manifest; ConfigError when it is missing or damaged."""
        try:
            data = decode_json(read_regular(file), unique=True)
            counts = {name: Counts(**entry) for name, entry in data.pop("counts").items()}
            manifest = DatasetManifest(counts=counts, **data)
            _check_types(manifest)
            return manifest
        except OSError as error:
            what = f"there is no prepared data here: {error.strerror}"
            raise ConfigError(
                str(file), what, "Run `xscale data prepare` with the same config."
            ) from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            what = f"the manifest is damaged ({reason(error)})"
            raise ConfigError(
                str(file), what, "Remove its folder and prepare the data again."
            ) from None


def _check_types(manifest: DatasetManifest) -> None:
    """Raise ValueError, with a clause, unless every field is what `save` writes."""
    types: dict[str, type | tuple[type, ...]] = {
        "source": dict,
        "corpus": str,
        "tokenizer": dict,
        "fingerprint": str,
        "vocabulary": int,
        "validation": (int, float),
        "files": dict,
        "state": dict,
        "read_files": int,
        "left_out": dict,
        "skipped": dict,
        "unknown": (int, type(None)),
        "pairs": bool,
        "sentences": bool,
        "labels": dict,
    }
    for name, kind in types.items():
        if not isinstance(getattr(manifest, name), kind):
            raise ValueError(f"{name} is {str(getattr(manifest, name))[:40]}")
    if manifest.vocabulary < 1 or not 0 <= manifest.validation < 1:
        raise ValueError(f"vocabulary is {manifest.vocabulary}, validation {manifest.validation}")
    if not all(isinstance(digest, str) for digest in manifest.files.values()):
        raise ValueError("a hash of its files is none")
    if not {"train"} <= manifest.counts.keys() <= {"train", "validation"}:
        raise ValueError(f"its splits are {', '.join(manifest.counts) or 'none'}")
    for name, counts in manifest.counts.items():
        if not all(
            type(count) is int and count >= 0
            for count in (counts.documents, counts.tokens, counts.bytes)
        ):
            raise ValueError(f"the counts of {name} are none")
    if manifest.unknown is not None and not 0 <= manifest.unknown <= sum(
        c.tokens for c in manifest.counts.values()
    ):
        raise ValueError(f"its unknown tokens are {manifest.unknown}")
    if manifest.labels:
        labels_of_manifest(manifest)
    _check_corpus(manifest)


def _check_corpus(manifest: DatasetManifest) -> None:
    """Raise ValueError, with a clause, unless what is said of the corpus is what `save` writes."""
    if manifest.state and (
        manifest.state.keys() != {"stamp", "content"} or not _are_text([*manifest.state.values()])
    ):
        raise ValueError("the state of its corpus is none")
    for entry in manifest.left_out.values():
        if not (
            isinstance(entry, list)
            and len(entry) == 2
            and type(entry[0]) is int
            and _are_text(entry[1])
        ):
            raise ValueError("the files that were left out are none")
    if skipped := manifest.skipped:
        documents, reasons, places = (
            skipped.get(name) for name in ("documents", "reasons", "first")
        )
        if type(documents) is not int or not isinstance(reasons, dict) or not _are_text(places):
            raise ValueError("the documents that were skipped are none")


def _are_text(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def labels_of_manifest(manifest: DatasetManifest) -> Labels | None:
    """Return the labels of the data; None: it has none. ValueError, with a clause, where they are not what is saved."""
    if not manifest.labels:
        return None
    kind, names, pairs = (manifest.labels.get(key) for key in ("kind", "names", "pairs"))
    are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if (
        kind not in ("class", "score", "tags")
        or not are_names
        or type(pairs) is not bool
        or len(manifest.labels) != 3
    ):
        raise ValueError("its labels are none")
    return Labels(kind, tuple(names or ()), pairs)
