"""A disk that fails under every write of a run, by a seed: full, read-only, broken, stale, slow; renames that fail."""

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any
from unittest import mock

FULL = (errno.ENOSPC, errno.EDQUOT)
KINDS: dict[str, tuple[int, ...]] = {
    "full": FULL,
    "torn": FULL,
    "no inode": FULL,
    "broken": (errno.EIO,),
    "read-only": (errno.EROFS,),
    "stale": (errno.ESTALE,),
    "no renames": (errno.EIO, errno.ESTALE, errno.EBUSY),
    "slow": (0,),
}
"""Kinds of episodes, with the errors that calls get in one."""
CALLS: dict[str, tuple[str, ...]] = {
    "full": ("open", "write", "mkdir", "fsync"),
    "torn": ("open", "write", "mkdir", "fsync"),
    "no inode": ("create", "mkdir"),
    "broken": ("open", "write", "truncate", "mkdir", "fsync", "rename", "replace"),
    "read-only": ("open", "write", "truncate", "mkdir", "rename", "replace"),
    "stale": ("write", "truncate", "fsync"),
    "no renames": ("rename", "replace"),
    "slow": ("open", "write", "fsync", "rename", "replace"),
}
"""Calls that fail in an episode of each kind. A full disk lets files shrink and be renamed; one without an inode, by
itself or by a quota, lets the files that there are be written. A call that creates a file opens it."""
LENGTHS = (1, 2, 5, 20, 100, 1000, 1_000_000)
"""Calls that an episode lasts for; the longest to the end of the run."""


class FaultyDisk:
    """Faults of the calls that write below `folder`: episodes of some calls, which begin by chance."""

    def __init__(self, folder: Path, seed: int, rate: float = 0.02) -> None:
        """`rate`: how likely a call begins an episode."""
        self.folder, self._draw, self._rate = os.fspath(folder), random.Random(seed), rate
        self._lock = threading.Lock()
        self._kind, self._left, self._epoch = "", 0, 0
        self.calls = 0
        self.episodes: list[str] = []
        """Kind, length and first call of each episode."""

    def touch(self, call: str, path: Any, opened: int | None = None) -> str:
        """Count a call and let it fail or wait; return the kind of an episode in which a write takes only a part.

        `opened`: the episode in which its file was opened. OSError.
        """
        if not os.fspath(path).startswith(self.folder):
            return ""
        with self._lock:
            self.calls += 1
            if not self._left and self._draw.random() < self._rate:
                self._kind, self._epoch = self._draw.choice(list(KINDS)), self._epoch + 1
                self._left = self._draw.choice(LENGTHS)
                self.episodes.append(f"{self._kind} for {self._left} calls from {call} of {Path(path).name}")
            if not self._left:
                return ""
            self._left -= 1
            kind, number = self._kind, self._draw.choice(KINDS[self._kind])
            spared = kind == "broken" and self._draw.random() < 0.5
        # A file that is opened again is stale no more.
        fails = call in CALLS[kind] or (call == "create" and "open" in CALLS[kind])
        if not fails or spared or (kind == "stale" and opened == self._epoch):
            return ""
        if kind == "slow":
            time.sleep(0.002)
            return ""
        if kind == "torn" and call == "write":
            return kind
        raise OSError(number, os.strerror(number), os.fspath(path))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put the faults under the calls of this process."""
        disk = self

        class FaultyFile(FileIO):
            def __init__(self, path: Any, mode: str, **options: Any) -> None:
                self._writes = mode != "rb"
                if self._writes:
                    disk.touch("open" if os.path.lexists(path) else "create", path)
                super().__init__(path, mode, **options)
                self._epoch = disk._epoch

            def write(self, content: Any) -> int:
                view = memoryview(content).cast("B")
                if disk.touch("write", self.name, self._epoch) == "torn":
                    if len(view) < 2:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    view = view[: len(view) // 2]
                return super().write(view) or 0

            def truncate(self, size: int | None = None) -> int:
                disk.touch("truncate", self.name, self._epoch)
                return super().truncate(size)

        def wrap(name: str) -> Callable[..., Any]:
            original = getattr(os, name)

            def call(path: Any, *more: Any, **options: Any) -> Any:
                where = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
                if isinstance(where, str | os.PathLike):
                    disk.touch(name, where)
                return original(path, *more, **options)

            return call

        patches = [mock.patch.object(os, name, wrap(name)) for name in ("mkdir", "fsync", "rename", "replace")]
        patches.append(mock.patch("xscale.core.files.run_files.FileIO", FaultyFile))
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()
            self._rate, self._left = 0.0, 0
