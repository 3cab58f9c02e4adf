"""Changes on disk: files are hashed while they are written, flushed to the device, and made visible by a rename.

XXH3 with 128 bits detects damage as surely as SHA-256 at a tenth of its time; it does not protect against forgery.
"""

import contextlib
import errno
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash
from typing_extensions import Buffer

from xscale.core.errors import ConfigError
from xscale.core.files.file_safety import remove_folder
from xscale.core.files.run_files import open_run_file

BLOCK = 1 << 20
SMALL_WRITE_BYTES = 1 << 16
"""Shorter writes are buffered: the format has dozens of a few bytes for each tensor."""
WRITE_BACK_BYTES = 32 << 20
"""Bytes after which the system starts to write to the device; smaller values hide less of the hashing (of 2 to 128
MiB)."""


@dataclass(frozen=True)
class Digest:
    """Size of a file in bytes and hash of its content, in hex."""

    size: int
    value: str
    hash: str
    """Name of the hash function in HASHES."""


class HashFunction(Protocol):
    def update(self, data: Buffer, /) -> None: ...

    def hexdigest(self) -> str: ...


HASHES: dict[str, Callable[[], HashFunction]] = {
    "xxh3_128": xxhash.xxh3_128,
    "sha256": hashlib.sha256,
}
"""Hash functions by the name that a manifest gives."""
HASH = "xxh3_128"
"""Hash of the files that are written now."""


def new_hash(name: str) -> HashFunction:
    return HASHES[name]()


def hash_file(path: Path, name: str = HASH) -> Digest:
    """Read a file and return its digest."""
    hashing, size = new_hash(name), 0
    block = bytearray(BLOCK)
    with io.BufferedReader(open_run_file(path)) as file:
        while count := file.readinto(block):
            hashing.update(memoryview(block)[:count])
            size += count
    return Digest(size, hashing.hexdigest(), name)


def to_json(digest: Digest) -> dict[str, Any]:
    return asdict(digest)


def from_json(path: Path, data: dict[str, Any]) -> Digest:
    """Decode an entry of the manifest at `path`, of the current format or of format 1, which had only SHA-256."""
    if "sha256" in data:
        return Digest(data["size"], data["sha256"], "sha256")
    if data["hash"] not in HASHES:
        what, known = f"its files are hashed by '{data['hash']}'", ", ".join(HASHES)
        raise ConfigError(
            str(path), what, f"This xscale knows {known}; read it with the version that wrote it."
        )
    return Digest(**data)


class HashingFile(io.RawIOBase):
    """File opened for writing that hashes what is written."""

    def __init__(self, path: Path, disk: "Disk") -> None:
        self._file = open_run_file(path, "wb")
        self._disk = disk
        self._path = path
        self._small = bytearray()
        self._size = 0
        """Bytes written to the file, without those in the buffer."""
        self._hash = new_hash(disk.hash)
        self._write_back_started = 0
        """Bytes whose write-back to the device has been started."""
        self._write_back_thread = ThreadPoolExecutor(1, "checkpoint-disk")

    def write(self, block: Buffer) -> int:
        view = memoryview(block).cast("B")
        if len(view) < SMALL_WRITE_BYTES:
            self._small += view
            if len(self._small) >= BLOCK:
                self._flush()
        else:
            self._flush()
            self._write_blocks(view)
        return len(view)

    def _flush(self) -> None:
        small, self._small = self._small, bytearray()
        if small:
            self._write_blocks(memoryview(small))

    def _write_blocks(self, view: memoryview) -> None:
        for start in range(0, len(view), BLOCK):
            block = view[start : start + BLOCK]
            self._disk.begin("write", self._path)
            unwritten = block
            while len(unwritten):
                # A disk that fills up accepts a part of a block before it refuses the next.
                unwritten = unwritten[self._file.write(unwritten) :]
            # The block is still in the processor's cache, where hashing takes half of the time.
            self._update_hash(block)
            self._size += len(block)
            if self._size - self._write_back_started >= WRITE_BACK_BYTES:
                self._write_back()

    def _update_hash(self, block: memoryview) -> None:
        self._hash.update(block)

    def _write_back(self) -> None:
        """Start to write to the device while the next blocks are copied and hashed, so that `sync` waits less."""
        # In a thread: the call waits until the device has room for more requests.
        self._write_back_thread.submit(
            _start_write_back,
            self._file.fileno(),
            self._write_back_started,
            self._size - self._write_back_started,
        )
        self._write_back_started = self._size

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size + len(self._small)

    def sync(self) -> None:
        """Flush the content to the device."""
        self._flush()
        os.fsync(self._file.fileno())

    def release(self) -> None:
        """End the thread and close the file."""
        # The thread ends first: after closing, the descriptor may belong to another file.
        self._write_back_thread.shutdown()
        self._file.close()

    def digest(self) -> Digest:
        """Digest of the content; call after `sync`."""
        return Digest(self._size, self._hash.hexdigest(), self._disk.hash)


def _start_write_back(file: int, start: int, size: int) -> None:
    # Advice only, which not every system and file system supports; correctness comes from fsync.
    with contextlib.suppress(OSError, AttributeError):
        # To drop pages from its cache the system has to write them first, and starts to.
        os.posix_fadvise(file, start, size, os.POSIX_FADV_DONTNEED)


class Disk:
    """File system operations of checkpoints; `touch` is called before each change (tests inject faults there)."""

    stream = HashingFile
    """Class of the files that `writing` opens."""

    def __init__(self, hash: str = HASH) -> None:
        self.hash = hash
        self.written: dict[Path, Digest] = {}
        """Digest of every file written through this object."""
        self.operations = 0
        """Changes begun so far: while it grows, the disk answers."""

    def begin(self, operation: str, path: Path) -> None:
        """Count a change that begins, and call `touch`."""
        self.operations += 1
        self.touch(operation, path)

    def touch(self, operation: str, path: Path) -> None:
        """Hook called before each `mkdir`, `open`, `write` (of a block), `sync`, `close`, `rename` and `delete`."""

    @contextmanager
    def writing(self, path: Path) -> Iterator[HashingFile]:
        """Open a new file; when the block ends without an exception, it is flushed and its digest in `written`."""
        self.begin("open", path)
        stream = self.stream(path, self)
        try:
            yield stream
            self.begin("sync", path)
            stream.sync()
            self.written[path] = stream.digest()
            self.begin("close", path)
        finally:
            stream.release()

    def write(self, path: Path, content: bytes) -> None:
        with self.writing(path) as stream:
            stream.write(content)

    def make(self, path: Path) -> None:
        self.begin("mkdir", path)
        path.mkdir(parents=True, exist_ok=True)

    def sync(self, folder: Path) -> None:
        """Flush the directory entries of `folder`: without that a rename may not survive a power cut."""
        self.begin("sync", folder)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, path: Path, to: Path) -> None:
        self.begin("rename", to)
        path.rename(to)

    def delete(self, path: Path) -> None:
        """Remove a folder and its content, if it exists."""
        self.begin("delete", path)
        remove_folder(path.parent, path.name)

    def require(self, folder: Path, size: int) -> None:
        """Raise OSError unless `size` bytes are free."""
        free = shutil.disk_usage(folder).free
        if free < size:
            raise OSError(
                errno.ENOSPC, f"{format_bytes(size)} needed, {format_bytes(free)} free", str(folder)
            )


def format_bytes(size: float) -> str:
    """Format bytes with the largest binary unit that leaves at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
