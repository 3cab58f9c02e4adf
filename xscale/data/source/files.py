"""Text files: decompressing them (Zstandard, RFC 8878), and streaming the records of a byte range."""

import gzip
import io
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from xscale.core.errors import ConfigError, Problem
from xscale.data.source.columns import STREAMED, is_columnar
from xscale.data.source.source import BadDocumentError, ByteRange

ZSTD_BLOCK = 1 << 11
"""Compressed bytes that are decompressed at once: at most 64 MiB, as four bytes can stand for 128 KiB."""
ZSTD_READ = 1 << 16


class ZstdReader(io.RawIOBase):
    """Stream of the decompressed frames of `raw`; EOFError when the last frame is truncated.

    The library's own stream reader accepts a truncated file.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        import zstandard

        self.raw = raw
        self.context = zstandard.ZstdDecompressor()
        self.frame: Any = None
        self.waiting = memoryview(b"")
        """Compressed bytes that are not decompressed yet."""
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            if not self._more():
                return 0
        size = min(len(buffer), len(self.ready))
        buffer[:size] = self.ready[:size]
        self.ready = self.ready[size:]
        return size

    def _more(self) -> bool:
        """Decompress one block; False at the end."""
        if not self.waiting:
            self.waiting = memoryview(self.raw.read(ZSTD_READ))
        block = self.waiting[:ZSTD_BLOCK]
        if not block:
            if self.frame is not None:
                raise EOFError("the last frame is truncated")
            return False
        if self.frame is None:
            self.frame = self.context.decompressobj()
        self.ready = memoryview(self.frame.decompress(block))
        unused = 0
        if self.frame.eof:
            unused, self.frame = len(self.frame.unused_data), None
        self.waiting = self.waiting[len(block) - unused :]
        return True


BLOCK = 1 << 20
RANGE_BYTES = 32 << 20
"""Bytes of an uncompressed file in one range."""


def split_into_ranges(
    files: list[Path], path: str, step: int | None = RANGE_BYTES
) -> list[ByteRange]:
    """Split `files` into ranges of `step` bytes, without splitting compressed files, or any file when `step` is None.

    ConfigError when all files are empty or one cannot be read.
    """
    ranges = []
    for file in files:
        try:
            status = file.stat()
        except OSError as error:
            raise ConfigError(str(file), f"the file cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(
                str(file),
                "this is not a regular file",
                "A corpus is read more than once: save it to a file first.",
            )
        is_full_file = step is None or is_compressed(file)
        stride = max(1, status.st_size) if is_full_file or step is None else step
        ranges += [
            ByteRange(str(file), start, min(start + stride, status.st_size), is_full_file)
            for start in range(0, status.st_size, stride)
        ]
    if not ranges:
        named = str(files[0]) if len(files) == 1 else f"all {len(files)} files"
        raise ConfigError(
            path, f"the corpus is empty: {named} have no bytes", "Name files that contain text."
        )
    return ranges


def is_compressed(file: Path | str) -> bool:
    return str(file).lower().endswith((".gz", ".zst"))


@contextmanager
def open_decompressed(file: str) -> Iterator[IO[bytes]]:
    """Open `file` as a stream of decompressed bytes; any error while reading becomes a ConfigError that names it."""
    try:
        with open(file, "rb") as raw:
            if file.lower().endswith(".gz"):
                with gzip.open(raw) as stream:
                    yield stream  # type: ignore[misc]
            elif file.lower().endswith(".zst"):
                import zstandard

                try:
                    yield io.BufferedReader(ZstdReader(raw), BLOCK)
                except zstandard.ZstdError as error:
                    if "too much memory" in str(error):
                        what = "the file was compressed with a window of more than 128 MiB"
                        raise ConfigError(
                            file, what, "Compress it again without --long, or with --long=27."
                        ) from None
                    raise ConfigError(
                        file, f"this is not Zstandard data: {error}", "Compress it again."
                    ) from None
            else:
                yield raw
    except FileNotFoundError:
        fix = "Restore it, or run again: finished shards are kept."
        raise ConfigError(file, "the file disappeared while the corpus was read", fix) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(
            file, f"the compressed data is damaged or truncated: {error}", "Compress it again."
        ) from None
    except OSError as error:
        raise ConfigError(file, f"the file cannot be read: {error.strerror or error}") from None


def _raise(error: BadDocumentError) -> None:
    raise error


def _too_long(file: str, begin: int, limit: int) -> BadDocumentError:
    what = f"the document that starts at byte {begin} is longer than {limit} bytes"
    fix = "Split documents in another way, or allow longer ones (`longest`)."
    return BadDocumentError("longer than `longest`", file, begin, Problem(file, what, fix))


def records(
    byte_range: ByteRange,
    delimiter: bytes,
    limit: int,
    on_bad: Callable[[BadDocumentError], None] = _raise,
) -> Iterator[tuple[int, bytes]]:
    """Yield (byte offset, bytes without the delimiter) of each record that starts in the range, one in memory.

    A record starts at the start of the file and after *every* occurrence of the delimiter, overlapping ones too: this
    depends only on the bytes around it, so that adjacent ranges neither share nor lose a record. `on_bad` gets the
    error of a record that is longer than `limit` bytes; if it returns, the record is left out.
    """

    def is_short(length: int, begin: int) -> bool:
        if length > limit:
            on_bad(_too_long(byte_range.file, begin, limit))
        return length <= limit

    width = len(delimiter)
    with open_decompressed(byte_range.file) as stream:
        base = 0 if byte_range.is_full_file else max(0, byte_range.start - width)
        stop = None if byte_range.is_full_file else byte_range.stop
        begin = 0 if byte_range.is_full_file or byte_range.start == 0 else None
        if base:
            stream.seek(base)
        buffer = bytearray()
        searched = base
        while True:
            at = buffer.find(delimiter, searched - base)
            if at >= 0:
                end = base + at + width
                if begin is not None and is_short(base + at - begin, begin):
                    yield begin, bytes(buffer[begin - base : max(begin - base, at)])
                if stop is not None and end >= stop:
                    return
                begin, searched = end, end - width + 1
                continue
            searched = max(searched, base + len(buffer) - width + 1)
            if begin is not None and not is_short(searched - begin, begin):
                # Its rest is read up to the next delimiter, and left out.
                begin = None
            keep = searched if begin is None else min(begin, searched)
            del buffer[: keep - base]
            base = keep
            block = stream.read(BLOCK)
            if not block:
                break
            buffer += block
        _require_untruncated(byte_range, stream, base + len(buffer))
        if (
            begin is not None
            and begin < base + len(buffer)
            and is_short(base + len(buffer) - begin, begin)
        ):
            yield begin, bytes(buffer[begin - base :])


def line_aligned_chunks(byte_range: ByteRange, length: int) -> Iterator[tuple[int, bytes]]:
    """Yield chunks of the file that end at the first line end after `length` bytes, with their offsets."""
    with open_decompressed(byte_range.file) as stream:
        position = 0
        # A read allocates what it is asked for, however small the file is.
        count = length if is_compressed(byte_range.file) else min(length, byte_range.size)
        while block := stream.read(count):
            line_end = stream.readline(length + BLOCK)
            if len(line_end) == length + BLOCK:
                what = f"the line that contains byte {position + len(block)} is longer than {length} bytes"
                problem = Problem(
                    byte_range.file, what, "Break it, or allow longer documents (`longest`)."
                )
                raise BadDocumentError("longer than `longest`", byte_range.file, position, problem)
            block += line_end
            yield position, block
            position += len(block)
        _require_untruncated(byte_range, stream, position)


def _require_untruncated(byte_range: ByteRange, stream: IO[bytes], end: int) -> None:
    if not is_compressed(byte_range.file) and end < byte_range.stop:
        what = (
            f"the file shrank to {end} bytes while it was read; it had at least {byte_range.stop}"
        )
        raise ConfigError(byte_range.file, what, "Run again when nothing writes to it.")


def decode_utf8(block: bytes, file: str, offset: int) -> str:
    """Decode UTF-8; BadDocumentError names the offset of an invalid byte or a NUL."""
    zero = block.find(b"\0")
    if zero >= 0:
        what = f"this is binary, not text: byte {offset + zero} is NUL"
        fix = "Leave it out of the source's paths, such as by docs/**/*.md, or convert it to UTF-8 text."
        problem = Problem(file, what, fix)
        raise BadDocumentError("binary", file, offset, problem)
    try:
        return block.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        what = f"this is not UTF-8 text: byte {offset + error.start} is 0x{block[error.start]:02x}"
        problem = Problem(
            file, what, "Convert it (iconv -t utf-8), or leave it out of the source's paths."
        )
        raise BadDocumentError("not UTF-8", file, offset, problem) from None


def line_at(file: str, offset: int) -> int:
    """Return the number of the line that contains byte `offset` of the decompressed file, counted from 1.

    In a file of rows and columns `offset` is the index of a row, and its number is returned.
    """
    if is_columnar(file) or file.startswith(STREAMED):
        return offset + 1
    lines = 1
    with open_decompressed(file) as stream:
        while offset > 0 and (block := stream.read(min(BLOCK, offset))):
            lines += block.count(b"\n")
            offset -= len(block)
    return lines
