"""A job as it will be submitted: the profile and the command line made one, before any text is written."""

import re
from dataclasses import dataclass
from pathlib import Path

from xscale_launch.errors import LaunchError
from xscale_launch.profile import Profile


@dataclass(frozen=True)
class Job:
    """Everything that the batch script says. Two equal jobs have the same script, letter for letter."""

    name: str
    run: Path
    """The run folder; for a sweep the folder that holds its members' run folders."""
    folder: Path
    """Working directory of the job: the one it was submitted from, so that paths in the config mean what they did."""
    profile: Profile
    python: str
    trainer: tuple[str, ...]
    """The command that gets the config's path and `run.dir`."""
    members: int = 0
    """Runs of a sweep, one an array task; 0 for a single run."""
    at_once: int = 0
    """Members of a sweep that may run at the same time; 0 for all."""
    chain: bool = False
    """One of a chain of jobs that follow each other: then the next one goes on, and this one is never put back."""

    @property
    def processes(self) -> int:
        """Workers of the whole job (of one member, in a sweep)."""
        return self.profile.nodes * self.profile.processes_per_node

    @property
    def script(self) -> Path:
        """Where the batch script is kept."""
        return self.run / "launch" / "job.sbatch"


def checked(job: Job) -> Job:
    """The job itself; raises `LaunchError` for what can be seen to be wrong without a cluster."""
    profile = job.profile
    numbers = {
        "--nodes": (profile.nodes, 1),
        "--processes-per-node": (profile.processes_per_node, 1),
        "crash_limit": (profile.crash_limit, 1),
        "--gpus-per-node": (profile.gpus_per_node, 0),
        "--cpus-per-process": (profile.cpus_per_process, 0),
        "--signal-seconds": (profile.signal_seconds, 0),
    }
    for name, (value, least) in numbers.items():
        if value < least:
            raise LaunchError(f"{name} is {value}; give {least} or more")
    if profile.gpus_per_node and profile.processes_per_node > profile.gpus_per_node:
        raise LaunchError(
            f"{profile.processes_per_node} processes a node would share {profile.gpus_per_node} GPUs; "
            f"give --processes-per-node {profile.gpus_per_node} or fewer"
        )
    limit = seconds(profile.time)
    if limit is not None and limit <= profile.signal_seconds:
        raise LaunchError(
            f"--time {profile.time} is not longer than the {profile.signal_seconds} s kept for saving "
            f"(signal_seconds): the job would be told to stop as it starts"
        )
    return job


def seconds(time: str | None) -> int | None:
    """A Slurm time limit in seconds, as `minutes`, `minutes:seconds`, `h:m:s`, `days-h`, `days-h:m` or `days-h:m:s`."""
    if time is None or time.upper() in ("UNLIMITED", "INFINITE", "0"):
        return None
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time):
        raise LaunchError(
            f"{time!r} is no time limit; write minutes, hours:minutes:seconds or days-hours, such as 12:00:00"
        )
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, secs = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, secs = parts
    else:
        hours, minutes, secs = 0, *(*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs
