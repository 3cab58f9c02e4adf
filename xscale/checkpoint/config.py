"""The `checkpoint:` section of a config: when checkpoints are saved and how many are kept."""

from typing import Literal

from xscale.core.config import Config, NonNegativeInt, PositiveFloat, PositiveInt
from xscale.core.paths import PathText


class CheckpointConfig(Config):
    """When checkpoints are written and how many are kept."""

    renamed = {"busy": "when_busy"}

    every_steps: NonNegativeInt = 200
    """Steps between checkpoints; one more is saved at the end and on a signal. 0: only those."""
    keep_last: PositiveInt | None = 3
    """Number of newest checkpoints to keep; null: all."""
    keep_every: PositiveInt | None = None
    """Checkpoints at multiples of this step are never deleted; null: none."""
    memory_every_steps: NonNegativeInt = 0
    """Steps between in-memory checkpoints, which outlive the processes: a restart with the same ranks resumes from them
    when they are newer than the disk's. With several machines, the next one has a copy. 0: none."""
    memory_folder: PathText = "/dev/shm"
    """A file system in memory (tmpfs) on each machine."""
    asynchronous: bool = True
    """Continue training while a copy of the state is written; false: wait for the disk."""
    when_busy: Literal["wait", "skip"] = "wait"
    """When the previous save is still in flight: wait for it, or skip this save."""
    verify: bool = True
    """Verify the hash of every file before a checkpoint is loaded."""
    deadline_seconds: PositiveFloat = 240.0
    """Time from a signal to the end of the save it triggers; after that the process exits without it."""
    failure_limit: NonNegativeInt = 3
    """Consecutive saves that may fail (full disk, missing folder) with a warning; the next failure ends the run."""
