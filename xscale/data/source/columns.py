"""Rows of Parquet files, and of the Arrow files of a saved Hugging Face dataset, read by pyarrow a batch at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from xscale.core.errors import ConfigError, Problem, nearest
from xscale.core.foreign import reason
from xscale.data.source.source import BadDocumentError, ByteRange

COLUMNAR_SUFFIXES = (".parquet", ".arrow")
ROWS = 1024
"""Most rows in memory at once, besides the compressed pages of one row group."""
BATCH_BYTES = 128 << 20
"""Most bytes of the rows in memory at once, where they are several: a dictionary stores a value of many rows once."""
GROWTH, SMALL_BYTES = 1000, 64 << 20
"""Most bytes that a byte of a column's compressed pages stands for, where they are many: no text compresses so."""
VALUE_BYTES = 8
"""Bytes of a value of a list in memory; the file may store many equal ones as their number."""

STREAMED = "hub:"
"""Begin of the names of what is no file: shards of a dataset that is streamed."""


def is_columnar(file: Path | str) -> bool:
    """Whether `file` is read by rows and columns."""
    return str(file).lower().endswith(COLUMNAR_SUFFIXES)


def require_column(field: str, columns: Sequence[str] | None, file: str, path: str) -> None:
    """Raise ConfigError unless `field` is one of the columns; None: they are not known."""
    if columns is not None and field not in columns:
        what = f"there is no column '{field}'; the file has: {', '.join(columns)}"
        raise ConfigError(file, what, f"{nearest(field, columns)} Set {path}.".strip())


def check_text(text: Any, file: str, row: int, field: str, longest: int) -> None:
    """Raise BadDocumentError unless the value `text` of the column `field` in a row is a text of at most `longest`
    bytes."""

    def bad(reason: str, what: str, fix: str) -> BadDocumentError:
        return BadDocumentError(reason, file, row, Problem(f"{file}:{row + 1}", what, fix))

    if not isinstance(text, str):
        what = f"the column '{field}' must hold strings, got {'null' if text is None else type(text).__name__}"
        raise bad(f"the column '{field}' holds no string", what, "Set data.source.field.")
    if len(text) > longest or len(text.encode("utf-8", "surrogatepass")) > longest:
        what = f"the document is longer than {longest} bytes"
        raise bad("longer than `longest`", what, "Shorten it, or allow longer ones (`longest`).")
    if "\0" in text:
        raise bad(
            f"the column '{field}' is not text", f"the column '{field}' contains NUL", "Clean it."
        )


def row_ranges(file: Path) -> list[ByteRange]:
    """Split a file at its row groups, by their compressed bytes; an Arrow file is one range.

    ConfigError for one that cannot be read.
    """
    size = file.stat().st_size
    if file.suffix.lower() == ".arrow":
        return [ByteRange(str(file), 0, size, is_full_file=True)]
    with _opened(str(file)) as opened:
        starts = _group_starts(opened)
    # The last range ends with the file, whose metadata stand there.
    ends = [*starts[1:], size]
    return [
        ByteRange(str(file), *ends_of, is_full_file=len(starts) == 1)
        for ends_of in zip(starts, ends, strict=True)
    ]


def rows(
    byte_range: ByteRange, fields: tuple[str, ...], path: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (index in the file, value of each of `fields`) of the rows in a range; a null is None.

    ConfigError at `path` without one of the columns, and for a file that is not what its name says.
    """
    file = byte_range.file
    with _opened(file) as opened:
        is_parquet = file.lower().endswith(".parquet")
        names = list(opened.schema_arrow.names if is_parquet else opened.schema.names)
        for field in fields:
            require_column(field, names, file, path)
        if is_parquet:
            starts = _group_starts(opened)
            groups = [
                n for n, start in enumerate(starts) if byte_range.start <= start < byte_range.stop
            ]
            first = (
                sum(opened.metadata.row_group(n).num_rows for n in range(groups[0]))
                if groups
                else 0
            )
            at_once = _rows_at_once(_largest_column(opened, groups, fields, file))
            batches = opened.iter_batches(at_once, row_groups=groups, columns=list(fields))
        else:
            first, batches = (
                0,
                (part for batch in opened for part in _parts(batch.select(list(fields)))),
            )
        for batch in batches:
            for row in range(batch.num_rows):
                # One by one: Python's copies of a text that many rows share would not be shared.
                yield first + row, {field: batch[field][row].as_py() for field in fields}
            first += batch.num_rows


def _parts(batch: Any) -> Iterator[Any]:
    at_once = _rows_at_once(max(column.get_total_buffer_size() for column in batch.columns))
    for start in range(0, batch.num_rows, at_once):
        yield batch.slice(start, at_once)


def _rows_at_once(size: int) -> int:
    """Return how many rows are read at once of a column of `size` bytes, all of which each row may repeat."""
    return max(1, min(ROWS, BATCH_BYTES // max(1, size)))


def _largest_column(opened: Any, groups: list[int], fields: Sequence[str], file: str) -> int:
    """Return the decompressed bytes of the largest column among `fields` in a row group, as the file says them.

    ConfigError for one whose bytes stand for more than those of any text.
    """
    largest = 0
    for number in groups:
        group = opened.metadata.row_group(number)
        for index in range(group.num_columns):
            column = group.column(index)
            name = next(
                (f for f in fields if f"{column.path_in_schema}.".startswith(f"{f}.")), None
            )
            if name is None:
                continue
            size, stored = column.total_uncompressed_size, column.total_compressed_size
            if opened.schema.column(index).max_repetition_level:
                size = max(size, VALUE_BYTES * column.num_values)
            if size > max(SMALL_BYTES, GROWTH * stored):
                what = f"the column '{name}' stands for {size / 1e6:.0f} MB by {stored} bytes"
                raise ConfigError(
                    file,
                    f"{what} in a row group, more than {GROWTH:,} times as much: this is no text",
                    "Leave it out of the source's paths, or write it anew without its repetitions.",
                )
            largest = max(largest, size)
    return largest


def _group_starts(opened: Any) -> list[int]:
    """Compressed bytes before each row group that has rows."""
    starts, total = [], 0
    for number in range(opened.metadata.num_row_groups):
        group = opened.metadata.row_group(number)
        starts.append(total)
        total += max(
            1, sum(group.column(n).total_compressed_size for n in range(group.num_columns))
        )
    return starts or [0]


@contextmanager
def _opened(file: str) -> Iterator[Any]:
    """Open a Parquet file or an Arrow stream; what pyarrow says of a bad one becomes a ConfigError that names it."""
    if find_spec("pyarrow") is None:
        raise ConfigError(
            file, "the library pyarrow is not installed", "Run: pip install 'pyarrow>=18'"
        )
    import pyarrow
    import pyarrow.parquet

    try:
        if file.lower().endswith(".parquet"):
            with pyarrow.parquet.ParquetFile(file) as opened:
                yield opened
        else:
            with pyarrow.memory_map(file) as mapped:
                try:
                    stream = pyarrow.ipc.open_stream(mapped)
                except pyarrow.ArrowInvalid:
                    mapped.seek(0)
                    table = pyarrow.ipc.open_file(mapped)
                    stream = pyarrow.RecordBatchReader.from_batches(
                        table.schema, (table.get_batch(n) for n in range(table.num_record_batches))
                    )
                yield stream
    except (pyarrow.ArrowException, OSError) as error:
        kind = "Parquet" if file.lower().endswith(".parquet") else "Arrow"
        raise ConfigError(
            file, f"the file cannot be read as {kind}: {reason(error)}", "Copy it again."
        ) from None
