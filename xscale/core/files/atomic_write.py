"""Writes of files that leave no half: atomic replacement, even in a power cut, and whole entries appended."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import IO, Any

from xscale.core.errors import ConfigError, FaultError
from xscale.core.files.file_errors import REMEDIES, disk_reason, disk_remedy
from xscale.core.files.file_safety import remove_file, remove_folder
from xscale.core.files.run_files import open_run_file

TEMPORARY_SUFFIX = ".part"
"""Ending of the temporary files, by which leftovers of killed processes are found."""


@contextmanager
def atomic_write(path: Path, mode: str = "w", **options: Any) -> Iterator[IO[Any]]:
    """Open a temporary file beside `path`; fsync it and rename it to `path` when the block ends without an exception.

    `mode` is "w" or "wb"; `options` go to TextIOWrapper (text defaults to UTF-8). When the block fails, the temporary
    file is removed and `path` keeps its content. Raises OSError.
    """
    if "b" not in mode:
        options.setdefault("encoding", "utf-8")
    # The name holds the process id: a process that lost its parent may still be writing the same file.
    part = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        # What an earlier process of that number left, or a link that was put there.
        remove_file(part.parent, part.name)
        with _buffered(open_run_file(part, "xb"), mode, options) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        # Of a disk that cannot be written this fails too, and would hide why.
        with suppress(OSError):
            remove_file(part.parent, part.name)
        raise


def _buffered(file: FileIO, mode: str, options: dict[str, Any]) -> IO[Any]:
    buffered = BufferedWriter(file)
    return buffered if "b" in mode else TextIOWrapper(buffered, **options)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the content of `path` in one step. Raises OSError."""
    with atomic_write(path, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


OTHER_DATA_FOLDER = "set another `data.folder`; finished shards are kept."


@contextmanager
def reporting_full_disk(path: Path, otherwise: str = OTHER_DATA_FOLDER) -> Iterator[None]:
    """Turn the OSError of a full or read-only disk, met while `path` is written, into a ConfigError that names it.

    `otherwise`: what the user may do but make it writable, as the end of a sentence.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in REMEDIES:
            raise
        folder = next(folder for folder in path.absolute().parents if folder.exists())
        free = f"{shutil.disk_usage(folder).free / 1e6:.0f} MB free"
        what = f"cannot be written ({disk_reason(error, path)}; {free})"
        raise ConfigError(str(path), what, f"{disk_remedy(error, path)}, or {otherwise}") from None


PROBE_BYTES = 1 << 20
"""Bytes that a disk with room takes after a library has failed on it."""


@contextmanager
def writing_folder(path: Path) -> Iterator[Path]:
    """Make a folder beside `path` to be filled, and by the caller to be renamed to `path`; removed where it is not.

    OSError that names `path` where the disk is full or may not be written, whatever a library makes of it.
    """
    part = path.with_name(f".{path.name}.writing")
    try:
        remove_folder(part.parent, part.name)
        part.mkdir(parents=True)
        try:
            yield part
        except (OSError, ConfigError, FaultError):
            raise
        except Exception:
            # Libraries have errors of their own for a file that they cannot write.
            write_atomically(part / "probe", bytes(PROBE_BYTES))
            raise
        finally:
            remove_folder(part.parent, part.name)
    except OSError as error:
        if error.errno not in REMEDIES:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


class AppendFile:
    """Appends to the file `path` of a run, whose folder it makes. Errors: OSError from the very write that failed.

    Without a buffer, whose text would be lost with the process, and which would raise late, and twice, on a full disk.
    Of an entry that could not be written whole nothing stays.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        self._path = path
        self._file = open_run_file(path, "ab")
        self._torn_at: int | None = None
        """Where an entry begins that was not written whole and is not cut off yet."""

    def write(self, entry: str | bytes) -> None:
        """Append an entry; text as UTF-8."""
        if self._torn_at is not None:
            self._mend(self._torn_at)
        unwritten = memoryview(entry.encode("utf-8") if isinstance(entry, str) else entry)
        self._torn_at = os.fstat(self._file.fileno()).st_size
        try:
            # A raw file writes as much as fits; the next call then raises.
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError:
            # A full disk still lets a file shrink; where that fails too, the next write begins with it.
            with suppress(OSError):
                self._mend(self._torn_at)
            raise
        self._torn_at = None

    def _mend(self, end: int) -> None:
        """Open the file again, which a network file system may ask for, and cut it off at `end`. OSError."""
        self._file.close()
        self._file = open_run_file(self._path, "ab")
        if os.fstat(self._file.fileno()).st_size > end:
            self._file.truncate(end)
        self._torn_at = None

    def close(self) -> None:
        """Flush to the disk and close."""
        if not self._file.closed:
            try:
                os.fsync(self._file.fileno())
            finally:
                self._file.close()
