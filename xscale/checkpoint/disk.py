"""Every change that a checkpoint makes on disk passes here: written through a hash, forced out, renamed."""

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


class Hashing(io.RawIOBase):
    """A file opened for writing; a thread hashes what is written while it is written."""

    def __init__(self, path: Path, disk: "Disk") -> None:
        self._file = path.open("wb", buffering=0)
        self._disk = disk
        self._path = path
        self._small = bytearray()
        self._size = 0
        """Bytes that the file has taken."""
        self._hash = begin(disk.hash)
        self._beside = ThreadPoolExecutor(1, "checkpoint-hash")

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
        if len(view) <= BLOCK:
            self._out(view)
            self._take(view)
            return
        taken = self._beside.submit(self._take, view)
        try:
            self._out(view)
        finally:
            # The caller may change or free what it gave.
            taken.result()

    def _out(self, view: memoryview) -> None:
        for start in range(0, len(view), BLOCK):
            part = view[start : start + BLOCK]
            self._disk.touch("write", self._path)
            while len(part):
                # A disk that fills up takes a part of a block before it refuses the next.
                part = part[self._file.write(part) :]
        self._size += len(view)

    def _take(self, view: memoryview) -> None:
        self._hash.update(view)

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
        self._beside.shutdown()
        self._file.close()

    def digest(self) -> Digest:
        """What the file must be; after `sync`."""
        return Digest(self._size, self._hash.hexdigest(), self._disk.hash)


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
