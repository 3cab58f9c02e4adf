"""Functions of Python's standard library and their packages: labelled texts that every machine has (code to class)."""

import textwrap
from collections.abc import Iterator
from typing import Any

from xscale.data.source.source import SOURCES, ByteRange, Document, Labels, SourceTraits
from xscale.data.source.stdlib import StandardLibrarySource, file_name, read_text
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
class StdlibLabelled(StandardLibrarySource):
    """A function or method of a package, without those inside it -> the name of the package."""

    @classmethod
    def labels(cls, config: Any) -> Labels:
        return Labels("class", PACKAGES)

    def byte_ranges(self) -> list[ByteRange]:
        ranges = super().byte_ranges()
        return [byte_range for byte_range in ranges if _package(byte_range) in PACKAGES]

    def read(self, byte_range: ByteRange) -> Iterator[Document]:
        label = PACKAGES.index(_package(byte_range))
        name, lines = file_name(byte_range), read_text(byte_range).splitlines()
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


def _package(byte_range: ByteRange) -> str:
    return file_name(byte_range).split("/")[0]


def _continues(line: str, indent: int) -> bool:
    """Return whether a line belongs to the function whose definition is indented by `indent`."""
    # A parameter list of several lines ends at the definition's own indentation.
    return (
        not line.strip() or len(line) - len(line.lstrip()) > indent or line.lstrip().startswith(")")
    )
