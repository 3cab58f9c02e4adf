"""Functions of Python's standard library and their packages: labelled texts that every machine has (code to class)."""

import platform
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xscale.data.source.files as files
from xscale.data.source.source import SOURCES, ByteRange, Document, Labels, Source, SourceTraits
from xscale.data.source.stdlib import Stdlib
from xscale.data.source.stdlib_pairs import DEFINITION

PACKAGES = ("asyncio", "email", "http", "idlelib", "importlib", "logging", "multiprocessing", "tkinter", "unittest",
            "urllib", "xml", "xmlrpc")  # fmt: skip
"""The packages with the most functions among those that Python has had since 3.11."""
SHORTEST = 3
"""Fewest lines of a function; a shorter one says little of its package."""


@SOURCES.register(
    "stdlib_labelled",
    traits=SourceTraits(bounded=True, resumable=True, download=False, records="labels"),
)
class StdlibLabelled(Source):
    """A function or method of a package, without those inside it -> the name of the package."""

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "python": platform.python_version()}

    @classmethod
    def labels(cls, config: Any) -> Labels:
        return Labels("class", PACKAGES)

    def byte_ranges(self) -> list[ByteRange]:
        ranges = Stdlib(Stdlib.Config(tests=False)).byte_ranges()
        return [byte_range for byte_range in ranges if _package(byte_range.file) in PACKAGES]

    def read(self, byte_range: ByteRange) -> Iterator[Document]:
        label = PACKAGES.index(_package(byte_range.file))
        name = Path(byte_range.file).relative_to(sysconfig.get_path("stdlib")).as_posix()
        with files.open_decompressed(byte_range.file) as stream:
            block = stream.read()
        try:
            lines = block.decode("utf-8-sig").splitlines()
        except UnicodeDecodeError:
            return
        number = 0
        while number < len(lines):
            definition = DEFINITION.match(lines[number])
            stop = number + 1
            if definition is not None:
                while stop < len(lines) and _continues(lines[stop], len(definition[1])):
                    stop += 1
                text = textwrap.dedent("\n".join(lines[number:stop])).strip()
                if text.count("\n") + 1 >= SHORTEST and "\0" not in text:
                    yield Document(f"{name}:{number + 1}", text, label=label)
            number = stop


def _package(file: str) -> str:
    return Path(file).relative_to(sysconfig.get_path("stdlib")).parts[0]


def _continues(line: str, indent: int) -> bool:
    """Return whether a line belongs to the function whose definition is indented by `indent`."""
    # A parameter list of several lines ends at the definition's own indentation.
    return (
        not line.strip() or len(line) - len(line.lstrip()) > indent or line.lstrip().startswith(")")
    )
