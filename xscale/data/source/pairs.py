"""Pairs of texts, a source and a target, in the fields of JSON lines or in the columns of CSV and TSV files."""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, ClassVar, Literal

import pydantic

import xscale.data.source.files as files
from xscale.core.config import PositiveInt
from xscale.core.errors import ConfigError, Problem, nearest
from xscale.core.files.file_safety import decode_json
from xscale.core.paths import PathTexts
from xscale.data.source.columns import COLUMNAR_SUFFIXES, is_columnar, row_ranges, rows
from xscale.data.source.listing import find_files
from xscale.data.source.source import (
    SOURCES,
    BadDocumentError,
    ByteRange,
    Document,
    FileSource,
    Source,
    SourceTraits,
)

LINES, TABLES = (".jsonl", ".ndjson"), {".csv": ",", ".tsv": "\t"}
PACKED = tuple(
    f"{ending}{packed}" for ending in (*LINES, *TABLES) for packed in ("", ".gz", ".zst")
)
SUFFIXES = (*PACKED, *COLUMNAR_SUFFIXES)
Bad = Callable[[str, str, str], BadDocumentError]
"""Makes the error of a record of (reason, what, fix)."""
Record = tuple[Any, ...]
"""The fields of a `Document` after its name."""


@SOURCES.register(
    "pairs", traits=SourceTraits(bounded=True, resumable=True, download=False, records="pairs")
)
class PairSource(FileSource):
    class Config(FileSource.Config):
        paths: PathTexts = ()
        """Files (.jsonl, .csv, .tsv, plain, .gz or .zst; .parquet, .arrow), folders and globs. A folder stands for
        every such file below it. The first row of a .csv or .tsv file names its columns; in .csv quoted cells may
        contain commas, quotes and line ends (RFC 4180), and .tsv has no quotes. One process reads such a file."""
        source_field: str = "source"
        """The key or column of the text that the model reads."""
        target_field: str = "target"
        """The key or column of the text that the model writes."""
        prefix: str = ""
        """Text that is put before each source and names the task, such as `summarize: ` (Raffel et al. 2020, T5)."""
        longest: PositiveInt = 16 << 20
        """Longest allowed line, in bytes."""

        @pydantic.model_validator(mode="after")
        def _two_fields(self) -> "PairSource.Config":
            if self.source_field == self.target_field:
                raise ValueError(
                    f"`source_field` and `target_field` are both '{self.source_field}'; name two fields"
                )
            return self

    field_keys: ClassVar[tuple[str, ...]] = ("source_field", "target_field")
    """Keys of the config with the names of the fields that every record has."""
    all_field_keys: ClassVar[tuple[str, ...]] = field_keys
    """Those, and keys with the names of fields that records have where they are not null."""

    @classmethod
    def example_in(cls, folder: Path, size: int) -> Source.Config:
        rows = [
            {"source": f"Line {number}. " * 40, "target": f"The target {number}."}
            for number in range(size // 1000 + 1)
        ]
        (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        with (folder / "b.csv").open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, ["source", "target"])
            writer.writeheader()
            writer.writerows(rows)
        return cls.Config(paths=(str(folder),))

    def identity(self) -> dict[str, Any]:
        data = super().identity()
        # Data that was prepared before there was a prefix is that without one.
        if not data.get("prefix"):
            data.pop("prefix", None)
        return data

    def byte_ranges(self) -> list[ByteRange]:
        key = "data.source.paths"
        paths = find_files(self.config.paths, SUFFIXES, key, self.left_out)
        if unknown := [file for file in paths if not file.name.lower().endswith(SUFFIXES)]:
            endings = ", ".join((*LINES, *TABLES))
            fix = f"Name files that end in {endings}, plain, .gz or .zst, or in {' or '.join(COLUMNAR_SUFFIXES)}."
            what = "has another ending than files of pairs"
            raise ConfigError([Problem(key, f"'{file}' {what}", fix) for file in unknown])
        ranges = [part for file in paths if is_columnar(file) for part in row_ranges(file)]
        text_files = [file for file in paths if not is_columnar(file)]
        for part in files.split_into_ranges(text_files, key) if text_files else ():
            if _delimiter(part.file) is None or part.start == 0:
                ranges.append(
                    replace(
                        part, is_full_file=part.is_full_file or _delimiter(part.file) is not None
                    )
                )
            else:
                # A quoted cell may contain line ends, so that the rows of a table are known from its start only.
                ranges[-1] = replace(ranges[-1], stop=part.stop)
        return ranges

    def read(self, byte_range: ByteRange) -> Iterator[Document]:
        delimiter = _delimiter(byte_range.file)
        if is_columnar(byte_range.file):
            records = self._rows(byte_range)
        else:
            records = (
                self._lines(byte_range)
                if delimiter is None
                else self._table(byte_range.file, delimiter)
            )
        for offset, parse in records:
            try:
                pair = parse(partial(self._bad, byte_range.file, offset))
            except BadDocumentError as error:
                self.skip(error)
                continue
            if pair is not None:
                yield Document(f"{byte_range.file}:{offset}", *pair)

    def _bad(self, file: str, offset: int, reason: str, what: str, fix: str) -> BadDocumentError:
        # Where documents are skipped, the lines of the few that are named are counted once, at the end.
        line = files.line_at(file, offset) if self.config.bad == "refuse" else f"byte {offset}"
        return BadDocumentError(reason, file, offset, Problem(f"{file}:{line}", what, fix))

    def _rows(self, byte_range: ByteRange) -> Iterator[tuple[int, Callable[[Bad], Record | None]]]:
        fields = tuple(
            name for key in self.all_field_keys if (name := getattr(self.config, key)) is not None
        )
        for row, values in rows(byte_range, fields, "data.source." + " or ".join(self.field_keys)):
            yield row, partial(self.record, values)

    def _lines(self, byte_range: ByteRange) -> Iterator[tuple[int, Callable[[Bad], Record | None]]]:
        for offset, line in files.records(byte_range, b"\n", self.config.longest, self.skip):
            yield offset, partial(self._parse_line, byte_range.file, offset, line)

    def _parse_line(self, file: str, offset: int, line: bytes, bad: Bad) -> Record | None:
        """Return the pair of a line; None for a blank one."""
        text = files.decode_utf8(line, file, offset)
        if not text.strip():
            return None
        try:
            data = decode_json(text, any_integer=True)
        except ValueError as error:
            what = f"the line is not JSON: {getattr(error, 'msg', error)}"
            raise bad("not JSON", what, "Each line of a .jsonl file is one object.") from None
        if not isinstance(data, dict):
            example = ", ".join(f'"{getattr(self.config, key)}": "..."' for key in self.field_keys)
            fix = f"Write {{{example}}}."
            raise bad("not an object", "the line is not an object", fix)
        return self.record(data, bad)

    def _table(
        self, file: str, delimiter: str
    ) -> Iterator[tuple[int, Callable[[Bad], Record | None]]]:
        with files.open_decompressed(file) as stream:
            lines = _Lines(stream, file, self.config.longest)
            quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if delimiter == "," else csv.QUOTE_NONE
            reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
            header = self._header(file, reader)
            while True:
                offset = lines.offset
                try:
                    row = next(reader)
                except StopIteration:
                    return
                except (csv.Error, BadDocumentError) as error:
                    yield offset, partial(_refuse_row, error)
                    if isinstance(error, csv.Error) and "unexpected end of data" in str(error):
                        return
                    continue
                yield offset, partial(self._parse_row, header, row)

    def _header(self, file: str, reader: Iterator[list[str]]) -> list[str]:
        try:
            header = next(reader, [])
        except csv.Error as error:
            raise ConfigError(
                f"{file}:1", f"the row of column names cannot be read: {error}"
            ) from None
        for key in self.field_keys:
            name = getattr(self.config, key)
            if name not in header:
                what = f"there is no column '{name}'; the first row names: {', '.join(header) or 'none'}"
                raise ConfigError(
                    f"{file}:1", what, f"{nearest(name, header)} Set data.source.{key}.".strip()
                )
        return header

    def _parse_row(self, header: list[str], row: list[str], bad: Bad) -> Record | None:
        """Return the pair of a row; None for a blank one."""
        if not row:
            return None
        if len(row) != len(header):
            what = f"the row has {len(row)} cells, and the first row names {len(header)} columns"
            raise bad(
                "another number of cells than columns",
                what,
                "Quote cells that contain the delimiter.",
            )
        return self.record(dict(zip(header, row, strict=True)), bad)

    def record(self, data: dict[str, Any], bad: Bad) -> Record:
        """Return the record of an object of JSON, or of a row by its columns; raises what `bad` makes."""
        source, target = (self.text(data, key, bad) for key in self.field_keys)
        return self.config.prefix + source, target

    def value(self, data: dict[str, Any], key: str, bad: Bad) -> Any:
        """Return the value of the field that the config names under `key`."""
        name = getattr(self.config, key)
        if name not in data:
            fix = f"{nearest(name, data)} Set data.source.{key}.".strip()
            raise bad(f"without the field '{name}'", f"the record has no field '{name}'", fix)
        return data[name]

    def text(self, data: dict[str, Any], key: str, bad: Bad) -> str:
        """Return the text of the field that the config names under `key`."""
        name, value = getattr(self.config, key), self.value(data, key, bad)
        if not isinstance(value, str):
            what = f"the field '{name}' must be a string, got {type(value).__name__}"
            raise bad(
                f"the field '{name}' is no string",
                what,
                f"Set data.source.{key}, or write a string.",
            )
        if not value.strip():
            what = f"the field '{name}' is empty"
            raise bad(what, what, "Leave the record out, or fill it.")
        if "\0" in value or (
            not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value)
        ):
            what = f"the field '{name}' is not text: it contains NUL or half a surrogate pair"
            raise bad(f"the field '{name}' is not text", what, "Clean it.")
        return value


def _delimiter(file: str) -> str | None:
    """Return the delimiter of a table; None for JSON lines."""
    plain = file.lower().removesuffix(".gz").removesuffix(".zst")
    return next((delimiter for ending, delimiter in TABLES.items() if plain.endswith(ending)), None)


def _refuse_row(error: csv.Error | BadDocumentError, bad: Bad) -> Record | None:
    if isinstance(error, BadDocumentError):
        raise error
    what = f"the row cannot be read: {error}"
    raise bad(
        "a row that cannot be read", what, 'Quote cells by ", and write a quote in them as "".'
    ) from None


class _Lines:
    """The decoded lines of a table, with the byte offset up to which they are read."""

    def __init__(self, stream: IO[bytes], file: str, longest: int) -> None:
        self.stream = stream
        self.file = file
        self.longest = longest
        self.offset = 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        begin, line = self.offset, self.stream.readline(self.longest + 1)
        if not line:
            raise StopIteration
        self.offset += len(line)
        if len(line) > self.longest:
            while not line.endswith(b"\n") and (line := self.stream.readline(self.longest)):
                self.offset += len(line)
            what = f"the line that starts at byte {begin} is longer than {self.longest} bytes"
            problem = Problem(self.file, what, "Shorten it, or allow longer ones (`longest`).")
            raise BadDocumentError("longer than `longest`", self.file, begin, problem)
        return files.decode_utf8(line, self.file, begin)
