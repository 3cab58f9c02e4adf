"""A text file that a long job writes and may resume; it appears under its name when it is complete."""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from xscale.core.errors import ConfigError
from xscale.core.files.atomic_write import reporting_full_disk, write_atomically
from xscale.core.files.file_lock import FileLock, LockedError
from xscale.core.files.file_safety import decode_json, read_regular, remove_file

FULL_DISK = "Free space, and run the same command to resume."


class ResumableFile:
    """A context in which text goes to `<path>.partial`; `<path>.progress.json` has the state up to which it is good.

    `finish` gives the file its name and removes the other one.
    """

    def __init__(self, path: Path, request: dict[str, Any]) -> None:
        """`request`: JSON data on which the content depends; an interrupted job with another request is not resumed."""
        self.path, self.request = path, request
        self.partial = path.with_name(f"{path.name}.partial")
        self.progress = path.with_name(f"{path.name}.progress.json")
        self.lock = FileLock(path.with_name(f"{path.name}.lock"))
        self.state: dict[str, Any] | None = None
        """State that the interrupted job saved last; None: the file is new."""
        self._file: IO[bytes] | None = None

    def __enter__(self) -> "ResumableFile":
        """Open the file. ConfigError when it is complete, another process writes it, or it has another request."""
        if self.path.exists():
            raise ConfigError(
                str(self.path), "the file exists already", "Remove it, or name another one."
            )
        with reporting_full_disk(self.path, FULL_DISK):
            try:
                self.lock.acquire()
            except LockedError as error:
                what = f"{str(error) or 'another process'} writes the file"
                raise ConfigError(
                    str(self.path), what, "Wait for it, or name another file."
                ) from None
            try:
                self._file = self._open()
            except BaseException:
                self.lock.remove()
                raise
        return self

    def _open(self) -> IO[bytes]:
        if not self.progress.exists():
            return self.partial.open("wb")
        fix = f"Remove {self.partial} and {self.progress.name} to write the file anew."
        try:
            saved = decode_json(read_regular(self.progress))
            request, state, size = saved["request"], saved["state"], int(saved["bytes"])
            file = self.partial.open("r+b")
        except (OSError, ValueError, TypeError, KeyError) as error:
            what = f"the interrupted job cannot be resumed: {error}"
            raise ConfigError(str(self.progress), what, fix) from None
        keys = request.keys() | self.request.keys()
        changed = sorted(key for key in keys if request.get(key) != self.request.get(key))
        if changed or file.seek(0, os.SEEK_END) < size:
            file.close()
            what = (
                f"it was begun with another {', '.join(changed)}"
                if changed
                else f"it has less than {size} bytes"
            )
            raise ConfigError(
                str(self.partial), what, f"{'Give the same, or r' if changed else 'R'}{fix[1:]}"
            )
        # Text after the saved state is of a job that was interrupted before it saved the next.
        file.truncate(size)
        file.seek(size)
        self.state = state
        return file

    def append(self, text: str, state: dict[str, Any]) -> None:
        """Write `text`, and save the state after it as JSON. ConfigError when the disk is full."""
        assert self._file is not None, "the context is not entered"
        with reporting_full_disk(self.partial, FULL_DISK):
            self._file.write(text.encode("utf-8"))
            self._file.flush()
            os.fsync(self._file.fileno())
            saved = {"request": self.request, "state": state, "bytes": self._file.tell()}
            write_atomically(self.progress, json.dumps(saved, indent=1) + "\n")

    def finish(self) -> None:
        """Give the complete file its name."""
        assert self._file is not None, "the context is not entered"
        self._file.close()
        self.partial.replace(self.path)
        remove_file(self.progress.parent, self.progress.name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._file is not None, "the context is not entered"
        self._file.close()
        if not self.progress.exists() and self.partial.exists():
            remove_file(self.partial.parent, self.partial.name)
        self.lock.remove()
