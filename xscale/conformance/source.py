"""Every source: what its traits promise, and what all of them do."""

import socket
import tracemalloc
from pathlib import Path
from typing import Any

from xscale.conformance.check import check
from xscale.core.registry import Entry
from xscale.data.source.source import Source

MEGABYTE = 1 << 20
SOME_FILES = 40


def source(entry: Entry[Any], folder: Path, size: int = 4000) -> Source:
    """A source of about `size` bytes; of a corpus of many small files, such as the standard library, the first ones."""
    corpus: Source = entry.part(entry.part.example_in(folder, size))
    ranges = corpus.byte_ranges()
    if len(ranges) > SOME_FILES and size <= 4000:
        corpus.byte_ranges = lambda: ranges[:SOME_FILES]  # type: ignore[method-assign]
    return corpus


@check("source", at_start=True)
def portions_cover_the_corpus_in_order(entry: Entry[Any], folder: Path) -> None:
    corpus = source(entry, folder)
    portions = corpus.byte_ranges()
    assert portions
    assert all(
        first.size > 0 and (Path(first.file).is_file() or entry.traits.download)
        for first in portions
    )
    assert len({(first.file, first.start) for first in portions}) == len(portions)
    documents = [document for portion in portions for document in corpus.read(portion)]
    assert documents == list(corpus.documents())
    assert all(first.text.strip() and "\0" not in first.text for first in documents)


@check("source")
def pairs_have_a_target_and_no_others(entry: Entry[Any], folder: Path) -> None:
    for _, document in zip(range(50), source(entry, folder).documents(), strict=False):
        if entry.traits.records != "pairs":
            assert document.target is None
            continue
        assert document.target is not None
        assert document.target.strip()
        assert "\0" not in document.target


@check("source")
def shards_are_the_whole(entry: Entry[Any], folder: Path) -> None:
    corpus = source(entry, folder)
    names = [first.name for first in corpus.documents()]
    parts = [first.name for shard in range(3) for first in corpus.documents(shard, 3)]
    assert sorted(parts) == sorted(names)


@check("source")
def what_is_resumable_has_names_and_an_order_that_stay(entry: Entry[Any], folder: Path) -> None:
    first, other = source(entry, folder), source(entry, folder)
    assert first.identity() == other.identity()
    names = [document.name for document in first.documents()]
    assert len(set(names)) == len(names) or not entry.traits.resumable
    assert names == [document.name for document in other.documents()] or not entry.traits.resumable


@check("source")
def what_is_bounded_never_holds_the_corpus(entry: Entry[Any], folder: Path) -> None:
    corpus = source(entry, folder, 12 * MEGABYTE)
    size = sum(first.size for first in corpus.byte_ranges())
    assert size > 3 * MEGABYTE
    # A small corpus that is part of Python is read until as much has gone through the source.
    times = -(-8 * MEGABYTE // size)
    tracemalloc.start()
    for _ in range(times):
        for _ in corpus.documents():
            pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * MEGABYTE or not entry.traits.bounded


@check("source")
def what_downloads_nothing_opens_no_socket(entry: Entry[Any], folder: Path) -> None:
    if entry.traits.download:
        return

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a socket was opened")

    opened = socket.socket
    socket.socket = refuse  # type: ignore[assignment,misc]
    try:
        assert next(iter(source(entry, folder).documents())).text
    finally:
        socket.socket = opened  # type: ignore[misc]
