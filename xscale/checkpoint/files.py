"""Names of the folders and files of checkpoints, and the lock of a run folder: one run at a time."""

import contextlib
import os
import re
from pathlib import Path

import torch.distributed as dist

from xscale.checkpoint.errors import consensus
from xscale.core.errors import ConfigError
from xscale.core.files.file_lock import FileLock, LockedError
from xscale.core.files.run_files import IrregularFileError

FORMAT = 2
"""Version of the layout below; it changes when an older xscale could not read a newer checkpoint."""
FORMATS = (1, 2)
"""Versions that can be read. In format 1 all files are hashed by SHA-256."""

CONFIG = "config.json"
STATE = "state.json"
MANIFEST = "manifest.json"
SEAL = "manifest.sha256"
"""Hash of the manifest itself, as `sha256sum --check` reads it."""
TENSORS = "tensors"
"""Folder in the format of torch distributed checkpoint: an index, and one `__RANK_0.distcp` for each rank."""
INDEX = ".metadata"

_STEP = re.compile(r"step-(\d{8,})")
_HIDDEN = re.compile(r"\.step-(\d{8,})\.(writing|replaced|deleting)")
_BAD = re.compile(r"bad-step-(\d{8,})-[a-z]+(-\d+)?")


def step_folder(folder: Path, step: int) -> Path:
    """Return the path of the complete checkpoint of `step`."""
    return folder / f"step-{step:08d}"


def hidden_folder(folder: Path, step: int, state: str) -> Path:
    """Return its path in a hidden state: `writing`, `replaced` (by one of the same step) or `deleting`."""
    return folder / f".step-{step:08d}.{state}"


def step_of(path: Path) -> int | None:
    """Parse the step in the name of a checkpoint's folder; None for any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def visible_steps(folder: Path) -> list[tuple[int, Path]]:
    """List (step, path) of every visible checkpoint, newest first, without checking any."""
    if not folder.is_dir():
        return []
    visible = [
        (step, path)
        for path in folder.iterdir()
        if (step := step_of(path)) is not None and path.is_dir()
    ]
    return sorted(visible, reverse=True)


def hidden_folders(folder: Path) -> list[tuple[int, str, Path]]:
    """List (step, state, path) of every folder that an interrupted save or deletion left."""
    if not folder.is_dir():
        return []
    matches = [
        (match, path) for path in folder.iterdir() if (match := _HIDDEN.fullmatch(path.name))
    ]
    return sorted((int(match[1]), match[2], path) for match, path in matches)


def bad_folders(folder: Path) -> list[Path]:
    """List the checkpoints that were found damaged and renamed."""
    return (
        sorted(path for path in folder.iterdir() if _BAD.fullmatch(path.name))
        if folder.is_dir()
        else []
    )


def bad_folder(path: Path, label: str) -> Path:
    """Return an unused name for a damaged checkpoint."""
    unused = path.with_name(f"bad-{path.name}-{label}")
    count = 2
    while os.path.lexists(unused):
        unused = path.with_name(f"bad-{path.name}-{label}-{count}")
        count += 1
    return unused


LOCK_FILE = "lock"
PATIENCE_SECONDS = 5.0
"""Time that a process being stopped gets to release the lock, so that its replacement is not refused."""


class RunLock:
    """Lock of a run folder, taken by rank 0 when built; use it in a `with` statement."""

    def __init__(
        self,
        folder: Path,
        *,
        group: dist.ProcessGroup | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """Collective. ConfigError, on every rank, when another process still has the lock after `patience_seconds`."""
        self._lock = FileLock(folder / LOCK_FILE)
        consensus(group, "locked").on_rank0(folder, lambda: self._acquire(folder, patience_seconds))

    def _acquire(self, folder: Path, seconds: float) -> None:
        try:
            self._lock.acquire(seconds)
        except LockedError as error:
            what = "another run is using this folder" + (f" ({error})" if str(error) else "")
            raise ConfigError(
                str(folder), what, "Wait for it to end, stop it, or give another run.dir."
            ) from None
        except IrregularFileError as error:
            what = f"{error.strerror}, so no run is started here"
            raise ConfigError(
                str(folder / LOCK_FILE), what, "Remove it, or give another run.dir."
            ) from None

    def is_in_place(self) -> bool:
        """Whether the run folder is still the one that was locked; true on ranks without the lock. Not collective.

        A lock that was deleted from the folder is made again.
        """
        # A network file system that does not answer is no deleted folder.
        with contextlib.suppress(OSError):
            return self._lock.is_in_place()
        return True

    def folder_moved_to(self) -> Path | None:
        """Return where the run folder is, if it was moved and that is known; None on ranks without the lock."""
        return self._lock.folder_moved_to()

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
