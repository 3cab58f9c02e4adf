"""Every source: what its traits promise, and what all of them do."""

import socket
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.families import each, family
from xscale.core.registry import Entry
from xscale.data.source.source import Source

SOURCES = family("source")
MEGABYTE = 1 << 20


SOME_FILES = 40


def source(entry: Entry[Any], folder: Path, size: int = 4000) -> Source:
    """A source of about `size` bytes; of a corpus of many small files, such as the standard library, the first ones."""
    made: Source = entry.part(entry.part.example_in(folder, size))
    ranges = made.byte_ranges()
    if len(ranges) > SOME_FILES and size <= 4000:
        made.byte_ranges = lambda: ranges[:SOME_FILES]  # type: ignore[method-assign]
    return made


@each(SOURCES)
def test_portions_cover_the_corpus_in_order(entry: Entry[Any], tmp_path: Path) -> None:
    corpus = source(entry, tmp_path)
    portions = corpus.byte_ranges()
    assert portions
    assert all(one.size > 0 and (Path(one.file).is_file() or entry.traits.download) for one in portions)
    assert len({(one.file, one.start) for one in portions}) == len(portions)
    documents = [document for portion in portions for document in corpus.read(portion)]
    assert documents == list(corpus.documents())
    assert all(one.text.strip() and "\0" not in one.text for one in documents)


@each(SOURCES)
def test_pairs_have_a_target_and_no_others(entry: Entry[Any], tmp_path: Path) -> None:
    for _, document in zip(range(50), source(entry, tmp_path).documents(), strict=False):
        if entry.traits.records != "pairs":
            assert document.target is None
            continue
        assert document.target is not None
        assert document.target.strip()
        assert "\0" not in document.target


@each(SOURCES)
def test_shards_are_the_whole(entry: Entry[Any], tmp_path: Path) -> None:
    corpus = source(entry, tmp_path)
    names = [one.name for one in corpus.documents()]
    parts = [one.name for shard in range(3) for one in corpus.documents(shard, 3)]
    assert sorted(parts) == sorted(names)


@each(SOURCES)
def test_what_is_resumable_has_names_and_an_order_that_stay(entry: Entry[Any], tmp_path: Path) -> None:
    one, other = source(entry, tmp_path), source(entry, tmp_path)
    assert one.identity() == other.identity()
    names = [document.name for document in one.documents()]
    assert len(set(names)) == len(names) or not entry.traits.resumable
    assert names == [document.name for document in other.documents()] or not entry.traits.resumable


@pytest.mark.long
@pytest.mark.sampled(3)
@each(SOURCES)
def test_what_is_bounded_never_holds_the_corpus(entry: Entry[Any], tmp_path: Path) -> None:
    corpus = source(entry, tmp_path, 12 * MEGABYTE)
    size = sum(one.size for one in corpus.byte_ranges())
    assert size > 3 * MEGABYTE
    # A small corpus that is part of Python is read until as much has gone through the source.
    times = -(-8 * MEGABYTE // size)
    tracemalloc.start()
    for _ in range(times):
        for _ in corpus.documents():
            pass
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < 6 * MEGABYTE or not entry.traits.bounded


@each(SOURCES)
def test_what_downloads_nothing_opens_no_socket(
    entry: Entry[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if entry.traits.download:
        return

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    assert next(iter(source(entry, tmp_path).documents())).text
