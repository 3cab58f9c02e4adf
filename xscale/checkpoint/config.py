"""The `checkpoint:` section of a run's config: what is saved when, and how much of it stays."""

from typing import Literal

import pydantic

from xscale.core.config import Config


class CheckpointConfig(Config):
    """When checkpoints are written and how many are kept."""

    every_steps: int = pydantic.Field(default=200, ge=0)
    """Steps between checkpoints; there is one more at the end and on a signal. 0: only those."""
    keep_last: int | None = pydantic.Field(default=3, ge=1)
    """Newest checkpoints that stay; null: all of them."""
    keep_every: int | None = pydantic.Field(default=None, ge=1)
    """Checkpoints whose step is a multiple of this stay for ever; null: none."""
    memory_every_steps: int = pydantic.Field(default=0, ge=0)
    """Steps between copies into memory that outlives the processes, from which a restart on the same ranks goes on
    when they are newer than the disk's; with several machines the next one has them too. 0: none."""
    memory_folder: str = "/dev/shm"
    """A file system in memory, on each machine."""
    asynchronous: bool = True
    """Go on training while a copy of the state is written; false: wait for the disk."""
    busy: Literal["wait", "skip"] = "wait"
    """What a save does that finds the one before still being written: wait for it, or be left out."""
    verify: bool = True
    """Compare the hash of every file with the manifest before a checkpoint is read."""
    deadline_seconds: float = pydantic.Field(default=240.0, gt=0)
    """From a signal to the end of the save that it asks for; then the process ends, and the checkpoint before stays."""
    failure_limit: int = pydantic.Field(default=3, ge=0)
    """Saves that may fail in a row (a full disk, a vanished folder) with only a warning; one more ends the run."""
