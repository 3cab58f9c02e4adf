"""Every change that a checkpoint makes on disk passes here: written through a hash, forced out, renamed."""

import contextlib
import errno
import io
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from typing_extensions import Buffer

from xscale.checkpoint.digest import BLOCK, HASH, Digest, begin

SMALL = 1 << 16
"""Shorter writes are gathered: the format has dozens of a few bytes for each tensor."""
AHEAD = 32 << 20
"""Bytes after which the disk begins to take them; with fewer at a time hashing is hidden less (of 2 to 128 MiB)."""


class Hashing(io.RawIOBase):
    """A file opened for writing, hashed while it is written."""

    def __init__(self, path: Path, disk: "Disk") -> None:
        self._file = path.open("wb", buffering=0)
        self._disk = disk
        self._path = path
        self._small = bytearray()
        self._size = 0
        """Bytes that the file has taken."""
        self._hash = begin(disk.hash)
        self._begun = 0
        """Of these the disk has been asked for."""
        self._asking = ThreadPoolExecutor(1, "checkpoint-disk")

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
            block = view[start : start + BLOCK]
            self._disk.touch("write", self._path)
            part = block
            while len(part):
                # A disk that fills up takes a part of a block before it refuses the next.
                part = part[self._file.write(part) :]
            # While the block is still in the processor's cache, where hashing it takes half of the time.
            self._take(block)
            self._size += len(block)
            if self._size - self._begun >= AHEAD:
                self._begin_out()

    def _take(self, block: memoryview) -> None:
        self._hash.update(block)

    def _begin_out(self) -> None:
        """Let the disk take what there is while the next is copied and hashed, so that less is left to wait for."""
        # By a thread: who asks waits until the disk has room for more requests.
        self._asking.submit(_ask, self._file.fileno(), self._begun, self._size - self._begun)
        self._begun = self._size

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size + len(self._small)

    def sync(self) -> None:
        """Force the content out."""
        self._flush()
        os.fsync(self._file.fileno())

    def release(self) -> None:
        """End the thread and close the file."""
        # Before its number may be another file's.
        self._asking.shutdown()
        self._file.close()

    def digest(self) -> Digest:
        """What the file must be; after `sync`."""
        return Digest(self._size, self._hash.hexdigest(), self._disk.hash)


def _ask(file: int, start: int, size: int) -> None:
    # Not every system has it, nor every file system: it is advice, and what is forced out at the end does not ask.
    with contextlib.suppress(OSError, AttributeError):
        # To drop pages from the cache the system first has to write them, and begins to.
        os.posix_fadvise(file, start, size, os.POSIX_FADV_DONTNEED)


class Disk:
    """The file system under checkpoints; `touch` sees each change before it is made (tests fail or die there)."""

    stream = Hashing
    """What files are opened as."""

    def __init__(self, hash: str = HASH) -> None:
        self.hash = hash
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


def readable(size: float) -> str:
    """Bytes in the largest unit of 1024 that leaves at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
