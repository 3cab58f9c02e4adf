"""Parquet files with a document in one column, and a Hugging Face dataset that was saved to disk."""

from collections.abc import Iterator
from pathlib import Path

from xscale.core.config import PositiveInt
from xscale.core.errors import ConfigError, Problem
from xscale.core.paths import PathTexts
from xscale.data.source.columns import COLUMNAR_SUFFIXES, check_text, is_columnar, row_ranges, rows
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


@SOURCES.register("parquet", traits=SourceTraits(bounded=True, resumable=True, download=False))
class Parquet(FileSource):
    class Config(FileSource.Config):
        paths: PathTexts = ()
        """Files (.parquet, or .arrow as `datasets` saves them), folders and globs. A folder stands for every such file
        below it. Each row group of a .parquet file is read by one process."""
        field: str = "text"
        """The column whose value is the document."""
        longest: PositiveInt = 256 << 20
        """Longest allowed document, in bytes."""

    @classmethod
    def example_in(cls, folder: Path, size: int) -> Source.Config:
        import pyarrow
        import pyarrow.parquet

        texts = [f"Line {number}. " * 40 for number in range(size // 500 + 1)]
        # Without compression, so that the file has about as many bytes as the texts.
        options = {"compression": "none", "use_dictionary": False, "row_group_size": 700}
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet", **options)
        return cls.Config(paths=(str(folder),))

    def byte_ranges(self) -> list[ByteRange]:
        key = "data.source.paths"
        paths = find_files(self.config.paths, COLUMNAR_SUFFIXES, key, self.left_out)
        if unknown := [file for file in paths if not is_columnar(file)]:
            fix = f"Name files that end in {' or '.join(COLUMNAR_SUFFIXES)}; for other files take kind: jsonl or text."
            raise ConfigError(
                [Problem(key, f"'{file}' has another ending", fix) for file in unknown]
            )
        return [part for file in paths for part in row_ranges(file)]

    def read(self, byte_range: ByteRange) -> Iterator[Document]:
        name, file = self.config.field, byte_range.file
        for row, values in rows(byte_range, (name,), "data.source.field"):
            text = values[name]
            try:
                check_text(text, file, row, name, self.config.longest)
            except BadDocumentError as error:
                self.skip(error)
                continue
            if not text.isspace() and text:
                yield Document(f"{file}:{row}", text)
