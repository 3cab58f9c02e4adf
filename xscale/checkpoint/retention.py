"""Retention: which checkpoints are kept. The newest good one always is."""

import logging
from collections.abc import Iterator
from pathlib import Path

from xscale.checkpoint import manifest
from xscale.checkpoint.disk import Disk
from xscale.checkpoint.errors import DamageError
from xscale.checkpoint.files import hidden_folder, visible_steps
from xscale.core.errors import ConfigError


def excess(
    folder: Path, keep_last: int | None, keep_every: int | None, *, hashes: bool = False
) -> list[tuple[int, Path]]:
    """List (step, path) of the checkpoints to delete, oldest first.

    These are the complete ones beyond the newest `keep_last`, except multiples of `keep_every`. A damaged checkpoint
    neither counts nor is deleted: `find_newest` sets it aside with its reason. With `hashes`, the content of the newest
    one is verified too, for callers that have not just written it.
    """
    if keep_last is None:
        return []
    assert keep_last >= 1, "the newest checkpoint must stay"
    good: list[tuple[int, Path]] = []
    for step, path in visible_steps(folder):
        if is_complete(path, hashes=hashes and not good):
            good.append((step, path))
    return [
        (step, path)
        for step, path in reversed(good[keep_last:])
        if not (keep_every and step % keep_every == 0)
    ]


def is_complete(path: Path, *, hashes: bool = False) -> bool:
    """Check that every file exists with its size, and with `hashes` its content."""
    try:
        stored = manifest.read(path)
        manifest.check_sizes(path, stored)
        if hashes:
            manifest.check_hashes(path, stored)
    except (DamageError, ConfigError):
        return False
    return True


def delete_excess(
    folder: Path, keep_last: int | None, keep_every: int | None, disk: Disk
) -> list[Path]:
    """Delete `excess` and return the deleted paths.

    A checkpoint is hidden before it is deleted, so that a kill never leaves an incomplete one visible.
    """
    rows = excess(folder, keep_last, keep_every)
    return [path for step, path in rows if delete(folder, step, path, disk)]


def make_room(
    folder: Path, keep_last: int | None, keep_every: int | None, size: int, disk: Disk
) -> None:
    """Delete, oldest first, what `delete_excess` will delete after the next save, until `size` bytes are free.

    Two good checkpoints stay, because the next one is not written yet. OSError when there is not enough room.
    """
    rows = iter(()) if keep_last is None else _expendable(folder, keep_last, keep_every)
    while True:
        try:
            return disk.require(folder, size)
        except OSError:
            step, path = next(rows, (None, None))
            if step is None or path is None:
                raise
            delete(folder, step, path, disk)


def _expendable(folder: Path, keep_last: int, keep_every: int | None) -> Iterator[tuple[int, Path]]:
    """Yield what `make_room` may delete; reads the checkpoints when the first is asked for."""
    yield from excess(folder, max(2, keep_last - 1), keep_every, hashes=True)


def delete(folder: Path, step: int, path: Path, disk: Disk) -> bool:
    """Hide a checkpoint and delete it; false where it cannot be hidden."""
    hidden = hidden_folder(folder, step, "deleting")
    disk.delete(hidden)
    try:
        disk.rename(path, hidden)
    except OSError as error:
        # The new checkpoint is complete: a failure to delete an old one does not make its save fail.
        logging.getLogger(__name__).warning(
            "%s: the old checkpoint is kept: %s", path, error.strerror
        )
        return False
    disk.delete(hidden)
    return True
