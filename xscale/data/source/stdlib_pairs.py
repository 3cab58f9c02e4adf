"""Functions of Python's standard library and their docstrings: pairs that every machine has (code to summary)."""

import ast
import inspect
import re
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import pydantic

from xscale.data.source.source import SOURCES, ByteRange, Document, Source, SourceTraits
from xscale.data.source.stdlib import StandardLibrarySource, file_name, read_text

DEFINITION = re.compile(r"^([ \t]*)(?:async[ \t]+)?def[ \t]+\w")
NAME = re.compile(r"def[ \t]+(\w+)")
DOCSTRING = re.compile(r"[rR]?[\"']")


@SOURCES.register(
    "stdlib_pairs",
    traits=SourceTraits(bounded=True, resumable=True, download=False, records="pairs"),
)
class StdlibPairs(StandardLibrarySource):
    """A function without its docstring -> the docstring's first paragraph (as in Husain et al. 2019, CodeSearchNet)."""

    class Config(Source.Config):
        tasks: tuple[Literal["summary", "name"], ...] = pydantic.Field(
            default=("summary",), min_length=1
        )
        """summary: a function -> its docstring's first paragraph. name: a function whose name is replaced by `_` -> its
        name. With several tasks each source begins with that of its pair, such as `summary: `, as in T5."""

    def identity(self) -> dict[str, Any]:
        data = super().identity()
        # Data that was prepared before there was a choice has one task.
        if self.config.tasks == ("summary",):
            del data["tasks"]
        return data

    def read(self, byte_range: ByteRange) -> Iterator[Document]:
        name, lines = file_name(byte_range), read_text(byte_range).splitlines()
        for number, line in enumerate(lines):
            if (definition := DEFINITION.match(line)) and (
                pair := _pair(lines, number, len(definition[1]))
            ):
                yield from self._documents(f"{name}:{number + 1}", *pair)

    def _documents(self, name: str, code: str, summary: str) -> Iterator[Document]:
        tasks = self.config.tasks
        for task in tasks:
            text, target = code, summary
            if task == "name":
                target = NAME.search(code)[1]  # type: ignore[index]
                text = re.sub(rf"\b{target}\b", "_", code)
            several = len(tasks) > 1
            yield Document(
                f"{name}:{task}" if several else name,
                f"{task}: {text}" if several else text,
                target,
            )


def _pair(lines: list[str], first: int, indent: int) -> tuple[str, str] | None:
    """Return the code and the summary of the function that begins at line `first`; None: it has no such pair."""
    body = first + 1
    while body < len(lines) and not lines[body - 1].split("#")[0].rstrip().endswith(":"):
        body += 1
    if body >= len(lines) or not DOCSTRING.match(lines[body].lstrip()):
        return None
    stop = body
    while stop < len(lines) and (
        not lines[stop].strip() or len(lines[stop]) - len(lines[stop].lstrip()) > indent
    ):
        stop += 1
    code = lines[first:stop]
    try:
        with warnings.catch_warnings():
            # The library's own invalid escapes are no concern of the run.
            warnings.simplefilter("ignore")
            (function,) = ast.parse(textwrap.dedent("\n".join(code))).body
    except (SyntaxError, ValueError):
        # A string of lines without indentation ends the function too early for this reading.
        return None
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or len(function.body) < 2:
        return None
    docstring = ast.get_docstring(function, clean=False)
    if docstring is None:
        return None
    begin, end = function.body[0].lineno - 1, function.body[0].end_lineno
    text = textwrap.dedent("\n".join(code[:begin] + code[end:])).strip()
    summary = " ".join(inspect.cleandoc(docstring).split("\n\n")[0].split())
    return (text, summary) if summary and "\0" not in text + summary else None
