"""File locks between processes, released by the system however a process ends."""

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import IO

from xscale.core.file_safety import decode_json, remove_file

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
        self._file: IO[bytes] | None = None

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
        file = self.path.open("a+b")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            holder = file.read()
            file.close()
            raise LockedError(_holder(holder)) from None
        except OSError:
            file.close()
            raise
        if not self._is_at_path(file):
            file.close()
            return False
        file.truncate(0)
        holder_data = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        file.write(f"{json.dumps(holder_data)}\n".encode())
        file.flush()
        self._file = file
        return True

    def is_in_place(self) -> bool:
        """Whether the file that this process locked is still at `path`: false once its folder is deleted or replaced.

        True where this process does not have the lock. Raises OSError when the file system cannot be asked.
        """
        return self._file is None or self._is_at_path(self._file)

    def _is_at_path(self, file: IO[bytes]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _holder(content: bytes) -> str:
    try:
        holder = decode_json(content)
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return ""
