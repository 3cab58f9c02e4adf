"""File locks between processes, released by the system however a process ends."""

import contextlib
import fcntl
import json
import os
import socket
import time
from io import FileIO
from pathlib import Path

from xscale.core.files.file_safety import decode_json, remove_file
from xscale.core.files.run_files import IrregularFileError, open_run_file

POLL_SECONDS = 0.1


class LockedError(Exception):
    """Another process has the lock; the text names that process, host and start where they are known, else is empty."""


class FileLock:
    """Exclusive lock on a file, taken by `acquire` and released by `release`, the end of `with` or of the process.

    It is a record lock (`lockf`): network file systems carry it between nodes and child processes do not inherit it.
    The file stays when it is released; `remove` removes it while this process has the lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._folder: os.stat_result | None = None
        """The folder in which the lock was taken."""

    def acquire(self, timeout_seconds: float = 0.0) -> None:
        """Take the lock and write into the file who has it; creates the folder.

        LockedError when another process still has it after `timeout_seconds` (which may be infinite); OSError.
        """
        end = time.monotonic() + timeout_seconds
        while True:
            try:
                # A file that its holder removed before this process locked it guards nothing: take the next one.
                while not self._try():
                    pass
                return
            except LockedError:
                if time.monotonic() >= end:
                    raise
                time.sleep(POLL_SECONDS)

    def _try(self) -> bool:
        """Lock the file at `path`; false where another process removed it meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = open_run_file(self.path, "a+b")
        try:
            return self._lock(file)
        except BaseException:
            file.close()
            raise

    def _lock(self, file: FileIO) -> bool:
        """Lock the open `file` and keep it; close it and return false where it is no longer at `path`."""
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise LockedError(_holder(_read(file))) from None
        if not self._is_at_path(file):
            file.close()
            return False
        if not _is_lock(_read(file)):
            raise IrregularFileError(self.path, "a file with other content", "a lock")
        holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }
        # The lock holds without its text, for which a full disk has no room.
        with contextlib.suppress(OSError):
            file.truncate(0)
            file.write(f"{json.dumps(holder)}\n".encode())
        self._file, self._folder = file, self.path.parent.stat()
        return True

    def is_in_place(self) -> bool:
        """Whether the file that this process locked is still at `path`; one deleted from its folder is made again.

        False once the folder is deleted or replaced, or another process has locked a file in its place; true where
        this process does not have the lock. Raises OSError when the file system cannot be asked.
        """
        if self._file is None or self._is_at_path(self._file):
            return True
        if not self._folder_in_place():
            return False
        before = self._file
        try:
            in_place = self._try()
        except LockedError:
            return False
        before.close()
        return in_place or self.is_in_place()

    def folder_moved_to(self) -> Path | None:
        """Return where the folder of the locked file is now; None: it is in place, gone, or not known where."""
        if self._file is None or self._folder_in_place():
            return None
        try:
            # The system knows the path of an open file. Where another lock lies there, another run has the folder.
            path = Path(os.readlink(f"/proc/self/fd/{self._file.fileno()}"))
            pairs = (
                (os.fstat(self._file.fileno()), path.lstat()),
                (self._folder, path.parent.stat()),
            )
            is_ours = all(
                known is not None and os.path.samestat(known, there) for known, there in pairs
            )
        except OSError:
            return None
        return path.parent if is_ours else None

    def _folder_in_place(self) -> bool:
        try:
            return self._folder is not None and os.path.samestat(
                self._folder, self.path.parent.stat()
            )
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _is_at_path(self, file: FileIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.lstat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def remove(self) -> None:
        """Remove the file, if this process has the lock and it is in place, and release it."""
        if self._file is not None and self.is_in_place():
            remove_file(self.path.parent, self.path.name)
        self.release()

    def release(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.truncate(0)
            self._file.close()
            self._file = None

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


MAX_HOLDER_BYTES = 4096
"""Most bytes of a lock's text that are read: what holds more is no lock."""
EMPTY = b"\0 \t\r\n"
"""Bytes that a lock may hold beside the text: zeros are what a power cut leaves."""


def _read(file: FileIO) -> bytes:
    file.seek(0)
    return file.read(MAX_HOLDER_BYTES + 1) or b""


def _is_lock(content: bytes) -> bool:
    """Whether a file with this content may be emptied: it holds nothing, or what a holder wrote, if only a part."""
    start, text = b'{"host": ', content.strip(EMPTY)
    return len(content) <= MAX_HOLDER_BYTES and (text.startswith(start) or start.startswith(text))


def _holder(content: bytes) -> str:
    try:
        holder = decode_json(content)
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return ""
