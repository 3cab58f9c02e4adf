"""Base class of sources: a corpus as byte ranges of files, each a stream of documents."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pydantic

from xscale.core import config as schema
from xscale.core.errors import ConfigError, Problem
from xscale.core.registry import Family
from xscale.data.source.listing import LeftOut


@dataclass(frozen=True, slots=True)
class Document:
    """A text with a name that does not depend on how the corpus is read."""

    name: str
    """File, and in a file of many documents the byte offset: `corpus/a.txt:8192`."""
    text: str
    target: str | None = None
    """The text that a model writes after reading `text`, of sources whose records are pairs; None: there is none."""
    second: str | None = None
    """The second text of a labelled pair of texts; None: there is none."""
    label: "int | float | tuple[int, ...] | None" = None
    """The label of labelled examples: the number of a class, a score, or the number of the tag of each word, of which
    `text` is made by single spaces; None: there is none."""
    group: str | None = None
    """A text that documents of one group share, such as the original of augmented examples; None: it is a group of its
    own."""

    @property
    def split_hash(self) -> int:
        """Hash whose value decides the split: the documents of a group, and equal documents, are in the same one."""
        return document_hash(self.text if self.group is None else self.group)


def document_hash(text: str) -> int:
    """Hash a text to [0, 2**64)."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")


def validation_below(fraction: float) -> int:
    """Return the bound below which a `Document.split_hash` means validation."""
    return int(fraction * 2**64)


@dataclass(frozen=True)
class SourceTraits:
    """Promises of a source."""

    bounded: bool
    """Reading takes memory that does not grow with the corpus."""
    resumable: bool
    """Documents have the same names and order each time."""
    download: bool
    """Reading needs a network."""
    records: Literal["text", "pairs", "labels"] = "text"
    """Content of a document: a text; a pair, of a text and the target that a model writes after reading it; or a
    labelled example, of one or two texts and a label."""


@dataclass(frozen=True)
class ByteRange:
    """Bytes of a file that one process reads; all byte ranges in order are the corpus."""

    file: str
    start: int
    """First byte; documents that start in [start, stop) belong to this range."""
    stop: int
    is_full_file: bool
    """The range is the full file, which may be compressed (then the bytes are those on disk)."""

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self.stop - self.start


SKIP_ADVICE = "data.source.bad=skip leaves out and counts the documents that cannot be read."


class BadDocumentError(ConfigError):
    """A document that cannot be read, in a file of which others can."""

    def __init__(self, reason: str, file: str, offset: int, problem: Problem) -> None:
        """`reason`: the kind of fault, to be counted. `offset`: the document's first byte in the decompressed file."""
        super().__init__(problem)
        self.reason = reason
        self.file = file
        self.offset = offset

    def __reduce__(self) -> tuple[type, tuple[tuple[Problem, ...]]]:
        return ConfigError, (self.problems,)


@dataclass
class SkippedDocuments:
    """How many documents were skipped for which reason, and where the first of them begin."""

    reasons: dict[str, int] = field(default_factory=dict)
    first: list[tuple[str, int, str]] = field(default_factory=list)
    """(file, byte offset, reason) of the first PLACES, in the corpus's order."""

    @property
    def count(self) -> int:
        return sum(self.reasons.values())

    def add(self, reason: str, file: str, offset: int) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if len(self.first) < PLACES:
            self.first.append((file, offset, reason))

    def extend(self, later: "SkippedDocuments") -> None:
        """Add those of a later part of the corpus."""
        for reason, count in later.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + count
        self.first = (self.first + later.first)[:PLACES]


PLACES = 5
"""How many skipped documents are named."""


@dataclass(frozen=True)
class Labels:
    """The labels of a source of labelled examples, or of data that was prepared from one."""

    kind: Literal["class", "score", "tags"]
    """A class or a score for an example, or a tag for each of its words."""
    names: tuple[str, ...] = ()
    """Names of the classes or tags, by number; scores have none."""
    pairs: bool = False
    """Whether an example has two texts."""


class Source:
    """A corpus as a list of byte ranges, each a stream of documents. The constructor reads nothing."""

    class Config(schema.Config):
        pass

    def __init__(self, config: Any) -> None:
        self.config = config
        self.skipped = SkippedDocuments()
        """Documents that `read` has left out so far."""
        self.left_out = LeftOut()
        """Files that `byte_ranges` has left out."""

    @classmethod
    def example_in(cls, folder: Path, size: int) -> Config:
        """Return a config with about `size` bytes to read, written into `folder` if necessary."""
        return cls.Config()

    def identity(self) -> dict[str, Any]:
        """Return JSON data that identifies this corpus, without reading it."""
        return schema.encode(self.config)

    def byte_ranges(self) -> list[ByteRange]:
        """Return the corpus in order; ConfigError when it is missing or empty."""
        raise NotImplementedError

    def read(self, byte_range: ByteRange) -> Iterator[Document]:
        """Yield the documents of a range in order; ConfigError names a file that is missing or not text."""
        raise NotImplementedError

    @classmethod
    def labels(cls, config: Any) -> Labels | None:
        """Return the labels of the source's examples; None unless the traits say that its records are labels."""
        return None

    def documents(self, shard: int = 0, shards: int = 1) -> Iterator[Document]:
        """Yield the documents of shard `shard` of `shards`: every shards-th range."""
        for byte_range in self.byte_ranges()[shard::shards]:
            yield from self.read(byte_range)


class FileSource(Source):
    """A source of files that may contain documents which cannot be read."""

    class Config(Source.Config):
        bad: Literal["refuse", "skip"] = "refuse"
        """Policy for a document that cannot be read: invalid JSON, a missing field, bytes that are not UTF-8, too
        long. refuse: end with its place. skip: leave it out, count it, and name the first places."""
        max_bad_fraction: float = pydantic.Field(default=0.01, gt=0, le=1)
        """With `bad: skip`, the preparation fails if more than this fraction of the documents is bad."""

    def identity(self) -> dict[str, Any]:
        data = super().identity()
        # The limit changes no document, and data that was prepared before there was a choice is that of `refuse`.
        del data["max_bad_fraction"]
        if data["bad"] == "refuse":
            del data["bad"]
        return data

    def skip(self, error: BadDocumentError) -> None:
        """Count a document that cannot be read, or raise its error, as the config says."""
        if self.config.bad == "refuse":
            if not error.offset:
                raise error
            # Documents before it could be read, so that it may be one of few.
            (problem,) = error.problems
            problem = replace(problem, fix=" ".join(filter(None, (problem.fix, SKIP_ADVICE))))
            raise BadDocumentError(error.reason, error.file, error.offset, problem)
        self.skipped.add(error.reason, error.file, error.offset)


SOURCES = Family("source", SourceTraits, Source)
