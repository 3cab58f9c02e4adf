"""JSON lines: one object per line with a document in one field; plain, `.gz` or `.zst`."""

import json
from collections.abc import Iterator
from pathlib import Path

import xscale.data.source.files as files
from xscale.core.config import PositiveInt
from xscale.core.errors import Problem, nearest
from xscale.core.files.file_safety import decode_json
from xscale.core.paths import PathTexts
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

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".json.gz", ".json.zst")


@SOURCES.register("jsonl", traits=SourceTraits(bounded=True, resumable=True, download=False))
class Jsonl(FileSource):
    class Config(FileSource.Config):
        paths: PathTexts = ()
        """Files, folders and globs. A folder stands for every .jsonl, .jsonl.gz and .jsonl.zst below it that is not
        hidden; links are followed, and each file is read once."""
        field: str = "text"
        """The key whose value is the document."""
        longest: PositiveInt = 256 << 20
        """Longest allowed line, in bytes."""

    @classmethod
    def example_in(cls, folder: Path, size: int) -> Source.Config:
        for name in "ab":
            lines = (
                json.dumps({"text": f"Line {number} of {name}. " * 40})
                for number in range(size // 1500 + 1)
            )
            (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        return cls.Config(paths=(str(folder),))

    def byte_ranges(self) -> list[ByteRange]:
        key = "data.source.paths"
        return files.split_into_ranges(
            find_files(self.config.paths, SUFFIXES, key, self.left_out), key
        )

    def read(self, byte_range: ByteRange) -> Iterator[Document]:
        for offset, line in files.records(byte_range, b"\n", self.config.longest, self.skip):
            try:
                text = files.decode_utf8(line, byte_range.file, offset)
                document = self._field(text, byte_range.file, offset) if text.strip() else ""
            except BadDocumentError as error:
                self.skip(error)
                continue
            if document and not document.isspace():
                yield Document(f"{byte_range.file}:{offset}", document)

    def _field(self, line: str, file: str, offset: int) -> str:
        name = self.config.field

        def bad(reason: str, what: str, fix: str) -> BadDocumentError:
            return BadDocumentError(reason, file, offset, Problem(f"{file}:{offset}", what, fix))

        try:
            data = decode_json(line, any_integer=True)
        except ValueError as error:
            # One besides JSONDecodeError says of nesting or of numbers that Python refuses them.
            what = f"the line that starts at this byte is not JSON: {getattr(error, 'msg', error)}"
            fix = "Each line of a .jsonl file is one object; for plain text use kind: text."
            if offset == 0 and line.lstrip().startswith("["):
                what = "the file is one array over several lines, and no object a line"
                fix = f"Write an object a line: jq -c '.[]' {file}"
            raise bad("not JSON", what, fix) from None
        if not isinstance(data, dict):
            what = "the line that starts at this byte is not an object"
            fix = 'Write {"text": "..."}.'
            if isinstance(data, list) and offset == 0:
                what, fix = "the file is an array", f"Write an object a line: jq -c '.[]' {file}"
            raise bad("not an object", what, fix)
        if name not in data:
            what = f"the object that starts at this byte has no field '{name}'"
            raise bad(
                f"without the field '{name}'", what, nearest(name, data) + " Set data.source.field."
            )
        value = data[name]
        if not isinstance(value, str):
            kind = "null" if value is None else type(value).__name__
            what = f"the field '{name}' must be a string, got {kind}"
            raise bad(f"the field '{name}' is no string", what, "Set data.source.field.")
        if "\0" in value or (
            not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value)
        ):
            what = f"the field '{name}' is not text: it contains NUL or half a surrogate pair"
            raise bad(f"the field '{name}' is not text", what, "Clean it.")
        return value
