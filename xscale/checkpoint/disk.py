"""Every change that a checkpoint makes on disk passes here: written through a hash, forced out, renamed."""

import errno
import hashlib
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Buffer

BLOCK = 1 << 20


@dataclass(frozen=True)
class Digest:
    """What a file must be: its size in bytes and the hex SHA-256 of its content."""

    size: int
    sha256: str


class Hashing(io.RawIOBase):
    """A file opened for writing that hashes what it is given, so that what was meant is known, not what arrived."""

    def __init__(self, path: Path, disk: "Disk") -> None:
        self._file = path.open("wb", buffering=0)
        self._disk = disk
        self._path = path
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, block: Buffer) -> int:
        view = memoryview(block).cast("B")
        for start in range(0, len(view), BLOCK):
            part = view[start : start + BLOCK]
            self._disk.touch("write", self._path)
            self._hash.update(part)
            while len(part):
                # A disk that fills up takes a part of a block before it refuses the next.
                part = part[self._file.write(part) :]
        self._size += len(view)
        return len(view)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Nothing: whoever was handed the stream may close it, and it still has to be forced out."""

    def release(self) -> None:
        self._file.close()

    @property
    def digest(self) -> Digest:
        return Digest(self._size, self._hash.hexdigest())


class Disk:
    """The file system under checkpoints; `touch` sees each change before it is made (tests fail or die there)."""

    def __init__(self) -> None:
        self.written: dict[Path, Digest] = {}
        """Every file written through this object, and what it must be."""

    def touch(self, what: str, path: Path) -> None:
        """Called before each change: `mkdir`, `open`, `write` (a block), `sync`, `close`, `rename`, `delete`."""

    @contextmanager
    def writing(self, path: Path) -> Iterator[Hashing]:
        """A new file; when the block ends well it is on the disk and in `written`."""
        self.touch("open", path)
        stream = Hashing(path, self)
        try:
            yield stream
            self.touch("sync", path)
            os.fsync(stream.fileno())
            self.touch("close", path)
        finally:
            stream.release()
        self.written[path] = stream.digest

    def write(self, path: Path, content: bytes) -> None:
        with self.writing(path) as stream:
            stream.write(content)

    def make(self, path: Path) -> None:
        self.touch("mkdir", path)
        path.mkdir(parents=True, exist_ok=True)

    def sync(self, folder: Path) -> None:
        """Force the names in `folder` out, without which a rename may not survive a power cut."""
        self.touch("sync", folder)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, path: Path, to: Path) -> None:
        self.touch("rename", to)
        path.rename(to)

    def delete(self, path: Path) -> None:
        """Remove a folder and what is in it; gone already is fine."""
        self.touch("delete", path)
        shutil.rmtree(path, ignore_errors=True)

    def require(self, folder: Path, size: int) -> None:
        """OSError when `size` bytes will not fit."""
        free = shutil.disk_usage(folder).free
        if free < size:
            raise OSError(
                errno.ENOSPC, f"{readable(size)} are to be written and {readable(free)} are free", str(folder)
            )


def digest_of(path: Path) -> Digest:
    """Read a file and say what it is."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256")
        return Digest(file.tell(), found.hexdigest())


def readable(size: float) -> str:
    """Bytes in the largest unit of 1024 that leaves at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
