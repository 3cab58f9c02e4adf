"""Sources that promise what they do not keep."""

import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from xscale.conformance import source as suite
from xscale.core.registry import Entry, Family
from xscale.data.source.source import ByteRange, Document, Source, SourceTraits


class Lines(Source):
    """Each line of the corpus is a document."""

    class Config(Source.Config):
        folder: str = ""
        """Where it lies."""

    @classmethod
    def example_in(cls, folder: Path, size: int) -> Source.Config:
        for number in range(4):
            line = 50 * f"A line of file {number}. " + "\n"
            (folder / f"{number}.txt").write_text(line * (size // 4 // len(line) + 1), encoding="utf-8")
        return cls.Config(folder=str(folder))

    def byte_ranges(self) -> list[ByteRange]:
        entries = sorted(Path(self.config.folder).iterdir())
        return [ByteRange(str(file), 0, file.stat().st_size, is_full_file=False) for file in entries]

    def read(self, portion: ByteRange) -> Iterator[Document]:
        with open(portion.file, encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                yield Document(f"{portion.file}:{number}", line)


class Hoarder(Lines):
    def documents(self, shard: int = 0, shards: int = 1) -> Iterator[Document]:
        return iter(list(super().documents(shard, shards)))


class Shuffled(Lines):
    def byte_ranges(self) -> list[ByteRange]:
        entries = super().byte_ranges()
        return random.sample(entries, len(entries))


class Nameless(Lines):
    def read(self, portion: ByteRange) -> Iterator[Document]:
        return (Document("it", one.text) for one in super().read(portion))


class Caller(Lines):
    def read(self, portion: ByteRange) -> Iterator[Document]:
        socket.socket().close()
        return super().read(portion)


class Half(Lines):
    """A part of several parts misses documents."""

    def documents(self, shard: int = 0, shards: int = 1) -> Iterator[Document]:
        return (one for at, one in enumerate(super().documents(shard, shards)) if shards == 1 or at % 2)


def registered(part: type[Source]) -> Entry[Any]:
    family: Family[SourceTraits] = Family("source", SourceTraits)
    traits = SourceTraits(bounded=True, resumable=True, download=False)
    family.register("cheat", traits=traits)(type("Cheat", (part,), {}))
    return family.get("cheat")


@pytest.mark.parametrize(
    ("cheat", "check"),
    [
        (Hoarder, suite.what_is_bounded_never_holds_the_corpus),
        (Nameless, suite.what_is_resumable_has_names_and_an_order_that_stay),
        (Half, suite.shards_are_the_whole),
    ],
)
def test_a_cheat_is_caught(cheat: type[Source], check: Any, tmp_path: Path) -> None:
    check(registered(Lines), tmp_path)
    with pytest.raises(AssertionError):
        check(registered(cheat), tmp_path)


def test_an_order_that_changes_is_caught(tmp_path: Path) -> None:
    random.seed(0)
    with pytest.raises(AssertionError):
        suite.what_is_resumable_has_names_and_an_order_that_stay(registered(Shuffled), tmp_path)


def test_a_socket_is_caught(tmp_path: Path) -> None:
    suite.what_downloads_nothing_opens_no_socket(registered(Lines), tmp_path)
    with pytest.raises(AssertionError):
        suite.what_downloads_nothing_opens_no_socket(registered(Caller), tmp_path)
