"""The source code of Python's standard library: a corpus that every machine has."""

import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xscale.data.source.files as files
from xscale.core.errors import ConfigError
from xscale.data.source.source import SOURCES, ByteRange, Document, Source, SourceTraits

NOT_TEXT = ("encodings", "site-packages", "dist-packages")
"""Folders left out: tables of character sets, and packages outside the standard library."""
TESTS = ("test", "tests", "idle_test")


class StandardLibrarySource(Source):
    """A source of the files of Python's standard library, which differ by the version of Python."""

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "python": platform.python_version()}

    def byte_ranges(self) -> list[ByteRange]:
        return Stdlib(Stdlib.Config(tests=False)).byte_ranges()


def file_name(byte_range: ByteRange) -> str:
    """Return the path of a file of the standard library in it."""
    return Path(byte_range.file).relative_to(sysconfig.get_path("stdlib")).as_posix()


def read_text(byte_range: ByteRange) -> str:
    """Return the text of a file of the standard library; empty for one in another encoding, as some tests are on
    purpose."""
    with files.open_decompressed(byte_range.file) as stream:
        block = stream.read()
    try:
        return block.decode("utf-8-sig")
    except UnicodeDecodeError:
        return ""


@SOURCES.register("stdlib", traits=SourceTraits(bounded=True, resumable=True, download=False))
class Stdlib(StandardLibrarySource):
    class Config(Source.Config):
        tests: bool = True
        """Include the library's own tests: about 30 MB with them, 12 MB without.

        Some distributions of Python come without the tests.
        """

    def byte_ranges(self) -> list[ByteRange]:
        root = Path(sysconfig.get_path("stdlib"))
        sources = []
        for file in sorted(root.rglob("*.py")):
            folders = file.relative_to(root).parts[:-1]
            if any(
                folder in NOT_TEXT or (folder in TESTS and not self.config.tests)
                for folder in folders
            ):
                continue
            sources.append(file)
        if not sources:
            fix = "Choose other text: data.source: {kind: text, paths: [...]}."
            raise ConfigError(
                "data.source", f"this Python has no standard library as files in {root}", fix
            )
        return files.split_into_ranges(sources, "data.source", step=None)

    def read(self, byte_range: ByteRange) -> Iterator[Document]:
        text = read_text(byte_range)
        if text and not text.isspace() and "\0" not in text:
            yield Document(file_name(byte_range), text)
