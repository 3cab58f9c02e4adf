"""Folders that all ranks must see: a run is refused before its first step where some rank does not see one."""

import time
import uuid
from contextlib import suppress
from pathlib import Path

from xscale.core.errors import ConfigError
from xscale.core.files.file_safety import remove_file
from xscale.mesh.consensus import Consensus
from xscale.mesh.rendezvous import names_of

VISIBLE_SECONDS = 10.0
"""How long a rank waits to see what another rank created: network file systems have delays."""


def becomes_visible(path: Path) -> bool:
    """Whether this process sees `path`, soon. Not collective."""
    end = time.monotonic() + VISIBLE_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def require_visible(ranks: Consensus, path: Path, folder: Path, key: str) -> None:
    """Raise ConfigError, the same on every rank, unless all see what rank 0 has at `path`. Collective.

    `folder`: the value of the config's `key`, in which it is.
    """
    seen = ranks.on_all(path, lambda: becomes_visible(path))
    if all(seen):
        return
    blind = names_of([rank for rank, sees in enumerate(seen) if not sees])
    what = f"rank 0 reads and writes the folder {folder}, and {blind} of {ranks.world} cannot see what is in it"
    fix = "Give a folder on a file system that all nodes share, by an absolute path."
    error = ConfigError(key, what, fix)
    error.same_on_all_ranks = True
    raise error


def require_shared(ranks: Consensus, folder: Path, key: str) -> None:
    """Raise ConfigError, the same on every rank, unless all see what rank 0 writes into `folder`. Collective.

    `key`: that of the config, whose value the folder is.
    """
    if ranks.is_single_process:
        return
    mark = folder / ranks.on_rank0(folder, lambda: _write_mark(folder))
    try:
        require_visible(ranks, mark, folder, key)
    finally:
        if ranks.is_rank0:
            with suppress(OSError):
                remove_file(folder, mark.name)


def _write_mark(folder: Path) -> str:
    """Write a file that no other process knows of, and return its name."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f".shared-{uuid.uuid4().hex}"
    mark.touch(exist_ok=False)
    return mark.name
