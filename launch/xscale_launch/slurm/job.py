"""A job to submit: the profile combined with the command line, before the batch script is rendered.

The jobs that were submitted for a run are listed in its folder, in `launch/jobs.jsonl`, one object per job.
"""

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

from xscale_launch.files import check_line, open_append, read_run_file
from xscale_launch.profile import Profile
from xscale_launch.status import LaunchError
from xscale_launch.typed_json import decode_json


@dataclass(frozen=True)
class Job:
    """Everything that the batch script depends on. Equal jobs have byte-identical scripts."""

    name: str
    run: Path
    """The run folder; for a sweep the parent folder of its members' run folders."""
    folder: Path
    """Working directory of the job: where it was submitted, so that relative paths in the config stay valid."""
    profile: Profile
    python: str
    trainer: tuple[str, ...]
    """The trainer's command, to which the config's path and `run.dir` are appended."""
    members: int = 0
    """Runs of a sweep, one per array task; 0 for a single run."""
    at_once: int = 0
    """Members of a sweep that may run at the same time; 0 for all."""
    chain: bool = False
    """The job is part of a chain: the next job of the chain resumes the run, and this one is never requeued."""

    @property
    def processes(self) -> int:
        """Return the number of workers of the job (of one member, in a sweep)."""
        return self.profile.nodes * self.profile.processes_per_node

    @property
    def script(self) -> Path:
        """Return the path of the batch script."""
        return self.run / "launch" / "job.sbatch"


@dataclass(frozen=True)
class SubmittedJob:
    """A job that was submitted for a run."""

    id: str
    """Slurm's job id; for a sweep the id of the array, `array_task` for a member of it."""
    script: str


def check_job(job: Job) -> Job:
    """Return the job; raise `LaunchError` for problems that do not depend on the cluster."""
    profile = job.profile
    numbers = {
        "--nodes": (profile.nodes, 1),
        "--processes-per-node": (profile.processes_per_node, 1),
        "crash_limit": (profile.crash_limit, 1),
        "--gpus-per-node": (profile.gpus_per_node, 0),
        "--cpus-per-process": (profile.cpus_per_process, 0),
        "--signal-seconds": (profile.signal_seconds, 0),
    }
    for name, (value, minimum) in numbers.items():
        if value < minimum:
            raise LaunchError(f"{name} must be at least {minimum}, got {value}")
    if profile.gpus_per_node and profile.processes_per_node > profile.gpus_per_node:
        raise LaunchError(
            f"{profile.processes_per_node} processes per node would share {profile.gpus_per_node} GPUs; "
            f"give --processes-per-node {profile.gpus_per_node} or less"
        )
    check_texts(job)
    limit = seconds(profile.time)
    if limit is not None and limit <= profile.signal_seconds:
        raise LaunchError(
            f"--time {profile.time} is not longer than the {profile.signal_seconds} s reserved for saving "
            f"(signal_seconds): the job would be signalled to stop when it starts"
        )
    return job


def check_texts(job: Job) -> None:
    """Raise `LaunchError` for a text that would change other lines of the script, or that sbatch would misread."""
    profile = job.profile
    settings = (
        "partition",
        "account",
        "qos",
        "constraint",
        "reservation",
        "memory",
        "time",
        "interface",
        "python",
    )
    texts = {name: value for name in settings if (value := getattr(profile, name))}
    paths = {
        "run.dir": str(job.run),
        "the working directory": str(job.folder),
        "the name of the job": job.name,
    }
    for what, text in {**texts, **paths}.items():
        check_line(what, text)
        if set(text) & set("\"'\\"):
            raise LaunchError(
                f"{what} {text!r} contains a quote or a backslash, which sbatch interprets: choose another"
            )
    for node in profile.exclude:
        if not re.fullmatch(r"[A-Za-z0-9_.\[\],-]+", node):
            raise LaunchError(f"exclude: {node!r} is not the name of a node")
    for what, lines in {
        "options": profile.options,
        "modules": profile.modules,
        "the trainer": job.trainer,
    }.items():
        for line in lines:
            check_line(what, line)
    container = profile.container
    if container is not None:
        for text in (container.image, container.python, *container.mounts, *container.options):
            check_line("container", text)


def seconds(time: str | None) -> int | None:
    """Convert a Slurm time limit to seconds: `minutes`, `m:s`, `h:m:s`, `days-h`, `days-h:m` or `days-h:m:s`."""
    if time is None or time.upper() in ("UNLIMITED", "INFINITE", "0"):
        return None
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time):
        raise LaunchError(
            f"{time!r} is not a time limit; write minutes, hours:minutes:seconds or days-hours, such as 12:00:00"
        )
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        hours, minutes, secs = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, secs = parts
    else:
        hours, minutes, secs = 0, *(*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs


def record_job(run: Path, job_id: str, script: Path) -> None:
    """Append a job to the run's list."""
    path = run / "launch" / "jobs.jsonl"
    with open_append(path) as file:
        entry = {"id": job_id, "script": str(script), "submitted": time.strftime("%FT%T%z")}
        file.write(f"{json.dumps(entry)}\n".encode())


def submitted_jobs(run: Path) -> list[SubmittedJob]:
    """Return the run's jobs, oldest first; raise `LaunchError` when the run was not submitted to Slurm."""
    path = run / "launch" / "jobs.jsonl"
    if not run.is_dir():
        meant = run.parent / "runs" / run.name
        hint = f"; did you mean {meant}?" if (meant / "config.yaml").is_file() else ""
        raise LaunchError(f"run folder {run} does not exist{hint}")
    if not path.is_file():
        raise LaunchError(
            f"{run} was not submitted to a cluster: it has no launch/jobs.jsonl. Stop a run that was started without "
            "Slurm by Ctrl-C or SIGTERM, and resume it with the same command"
        )
    jobs: list[SubmittedJob] = []
    for number, line in enumerate(read_run_file(path).splitlines(), start=1):
        try:
            jobs += [decode_json(line, SubmittedJob)] if line.strip() else []
            # The id becomes an argument of scontrol and scancel.
            if jobs and not re.fullmatch(r"\d+(_\d+)?", jobs[-1].id):
                raise ValueError(f"{jobs[-1].id!r} is not the id of a job")
        except ValueError as error:
            raise LaunchError(
                f"{path}:{number} is not a submitted job: {error}; remove that line"
            ) from None
    return jobs
