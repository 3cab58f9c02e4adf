"""What a run folder remembers of its jobs: `launch/jobs.jsonl`, one object a submitted job."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from xscale_launch.errors import LaunchError


@dataclass(frozen=True)
class Submitted:
    """One job that was submitted for a run."""

    id: str
    """Slurm's job id; that of the array, for a sweep; `array_task` for a member of one."""
    script: str


def write(run: Path, job_id: str, script: Path) -> None:
    """Adds a job to the run's list."""
    path = run / "launch" / "jobs.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        said = {"id": job_id, "script": str(script), "submitted": time.strftime("%FT%T%z")}
        file.write(json.dumps(said) + "\n")


def read(run: Path) -> list[Submitted]:
    """The run's jobs, oldest first; raises `LaunchError` when the folder is none of a run that was submitted."""
    path = run / "launch" / "jobs.jsonl"
    if not run.is_dir():
        raise LaunchError(f"there is no run folder {run}")
    if not path.is_file():
        raise LaunchError(
            f"{run} was not submitted to a cluster: it has no launch/jobs.jsonl. What was started without a queue is "
            "stopped by Ctrl-C or SIGTERM, and goes on by the same command"
        )
    said = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [Submitted(str(one["id"]), str(one["script"])) for one in said]
