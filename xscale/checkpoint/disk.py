"""Every change that a checkpoint makes on disk passes here: written through a hash, forced out, renamed."""

import errno
import hashlib
import io
import os
import queue
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Buffer

BLOCK = 1 << 20
SMALL = 1 << 16
"""Shorter writes are gathered: the format has dozens of a few bytes for each tensor."""


@dataclass(frozen=True)
class Digest:
    """What a file must be: its size in bytes and the hex SHA-256 of its content."""

    size: int
    sha256: str


class Hashing(io.RawIOBase):
    """A file opened for writing; a thread hashes behind the writer what the file has taken."""

    def __init__(self, path: Path, disk: "Disk") -> None:
        self._file = path.open("w+b", buffering=0)
        self._disk = disk
        self._path = path
        self._small = bytearray()
        self._size = 0
        """Bytes that the file has taken."""
        self._hash = hashlib.sha256()
        self._hashed = 0
        self._block = bytearray(BLOCK)
        self._ready: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: OSError | None = None

    def write(self, block: Buffer) -> int:
        view = memoryview(block).cast("B")
        if len(view) < SMALL:
            self._small += view
            if len(self._small) >= BLOCK:
                self._flush()
        else:
            self._flush()
            self._put(view)
        return len(view)

    def _flush(self) -> None:
        small, self._small = self._small, bytearray()
        if small:
            self._put(memoryview(small))

    def _put(self, view: memoryview) -> None:
        for start in range(0, len(view), BLOCK):
            part = view[start : start + BLOCK]
            self._disk.touch("write", self._path)
            while len(part):
                # A disk that fills up takes a part of a block before it refuses the next.
                part = part[self._file.write(part) :]
            self._size += len(view[start : start + BLOCK])
            if self._size - self._hashed >= BLOCK:
                self._follow()

    def _follow(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint-hash", daemon=True)
            self._thread.start()
        self._ready.put(self._size)

    def _run(self) -> None:
        while (until := self._ready.get()) is not None:
            if self._failure is not None:
                continue
            try:
                self._take(until)
            except OSError as error:
                self._failure = error

    def _take(self, until: int) -> None:
        while self._hashed < until:
            view = memoryview(self._block)[: min(BLOCK, until - self._hashed)]
            count = os.preadv(self._file.fileno(), [view], self._hashed)
            if not count:
                raise OSError(errno.EIO, "the file is shorter than what was written to it", str(self._path))
            self._hash.update(view[:count])
            self._hashed += count

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size + len(self._small)

    def sync(self) -> None:
        """Force the content out; the rest of it is hashed meanwhile."""
        self._flush()
        self._ready.put(self._size)
        os.fsync(self._file.fileno())

    def release(self) -> None:
        """End the thread and close the file."""
        if self._thread is not None:
            self._ready.put(None)
            self._thread.join()
            self._thread = None
        self._file.close()

    def digest(self) -> Digest:
        """What the file must be; after `sync`."""
        if self._thread is None:
            self._take(self._size)
        else:
            self._ready.put(self._size)
            self._ready.put(None)
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure
        return Digest(self._size, self._hash.hexdigest())


class Disk:
    """The file system under checkpoints; `touch` sees each change before it is made (tests fail or die there)."""

    stream = Hashing
    """What files are opened as."""

    def __init__(self) -> None:
        self.written: dict[Path, Digest] = {}
        """Every file written through this object, and what it must be."""

    def touch(self, what: str, path: Path) -> None:
        """Called before each change: `mkdir`, `open`, `write` (a block), `sync`, `close`, `rename`, `delete`."""

    @contextmanager
    def writing(self, path: Path) -> Iterator[Hashing]:
        """A new file; when the block ends well it is on the disk and in `written`."""
        self.touch("open", path)
        stream = self.stream(path, self)
        try:
            yield stream
            self.touch("sync", path)
            stream.sync()
            self.written[path] = stream.digest()
            self.touch("close", path)
        finally:
            stream.release()

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
