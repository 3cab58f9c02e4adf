"""UTF-8 text files, each one document or split at lines, blank lines or a separator."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pydantic

import xscale.data.source.files as files
from xscale.core.config import PositiveInt
from xscale.core.paths import PathTexts, Texts
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


@SOURCES.register("text", traits=SourceTraits(bounded=True, resumable=True, download=False))
class Text(FileSource):
    class Config(FileSource.Config):
        paths: PathTexts = ()
        """Files, folders and globs (`**` for any depth). A folder stands for every file below it that is not hidden;
        links are followed, and each file is read once."""
        document: Literal["file", "paragraph", "line", "separator"] = "file"
        """Unit of a document: a file, text between blank lines, a line, or text between separators."""
        separator: str = ""
        """Text between two documents when `document` is `separator`, such as `<|endoftext|>`."""
        endings: Texts = ()
        """Endings of the files to read in a folder, such as [.txt, .md]; empty: all files."""
        longest: PositiveInt = 16 << 20
        """Bytes. A longer file is split at line ends into several documents; any other longer document is an error."""

        @pydantic.model_validator(mode="after")
        def _separator_fits(self) -> "Text.Config":
            if (self.document == "separator") != bool(self.separator):
                raise ValueError("`separator` requires `document: separator`, and the reverse")
            return self

    @classmethod
    def example_in(cls, folder: Path, size: int) -> Source.Config:
        for number in range(32):
            line = f"A line of file {number}.\n"
            (folder / f"{number}.txt").write_text(
                line * (size // 32 // len(line) + 1), encoding="utf-8"
            )
        return cls.Config(paths=(str(folder),))

    def byte_ranges(self) -> list[ByteRange]:
        paths = find_files(
            self.config.paths, self.config.endings, "data.source.paths", self.left_out
        )
        return files.split_into_ranges(
            paths, "data.source.paths", *([None] if self.config.document == "file" else [])
        )

    def read(self, byte_range: ByteRange) -> Iterator[Document]:
        delimiters = {"line": "\n", "paragraph": "\n\n", "separator": self.config.separator}
        if self.config.document == "file":
            blocks = files.line_aligned_chunks(byte_range, self.config.longest)
        else:
            delimiter = delimiters[self.config.document].encode()
            blocks = files.records(byte_range, delimiter, self.config.longest, self.skip)
        try:
            for offset, block in blocks:
                if text := self._decode(block, byte_range.file, offset):
                    yield Document(f"{byte_range.file}:{offset}", text)
        except BadDocumentError as error:
            # A line that cannot be divided: the rest of its file is left out.
            self.skip(error)

    def _decode(self, block: bytes, file: str, offset: int) -> str:
        """Return the text of a document; empty for one that is blank or skipped."""
        try:
            text = files.decode_utf8(block, file, offset)
        except BadDocumentError as error:
            self.skip(error)
            return ""
        return "" if text.isspace() else text
