"""`xscale launch status | logs | cancel | requeue | resume RUN`: act on the jobs recorded in a run folder."""

import argparse
import codecs
import io
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from xscale_launch import status
from xscale_launch.command import columns, say, write
from xscale_launch.files import open_run_file, read_run_file
from xscale_launch.paths import path_argument
from xscale_launch.slurm import queue, submit
from xscale_launch.slurm.job import record_job, submitted_jobs
from xscale_launch.slurm.script import script_path
from xscale_launch.status import LaunchError
from xscale_launch.typed_json import decode_json

LIVE = ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "REQUEUED")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument RUN."""
    parser.add_argument("run", metavar="RUN", type=path_argument, help="the run folder")


def add_status(parser: argparse.ArgumentParser) -> None:
    """Add the options of `xscale launch status`."""
    add_run(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Add the options of `xscale launch logs`."""
    add_run(parser)
    parser.add_argument(
        "--rank",
        type=int,
        help="rank whose output is shown; default: the job's output, with rank 0's",
    )
    parser.add_argument("--member", help="member of a sweep")
    parser.add_argument("--lines", type=int, default=40, help="number of last lines to show")
    parser.add_argument(
        "--follow", action="store_true", help="follow the output until the job ends"
    )


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Add the options of `xscale launch resume`."""
    add_run(parser)
    parser.add_argument("--after", metavar="JOB", help="start after this job has ended")


def show_status(options: argparse.Namespace) -> int:
    """Print the run's jobs in Slurm and its last step."""
    run = options.run.absolute()
    ids = job_ids(run)
    runs = [progress(folder) for folder in folders(run)]
    try:
        jobs = [summary(job) for job in queue.known_jobs(ids)]
    except LaunchError as error:
        if options.json:
            raise
        print_runs(runs)
        say(f"the jobs cannot be queried here: {error}")
        return status.DONE
    if options.json:
        reached = {"run": str(run), "jobs": jobs, "runs": [asdict(state) for state in runs]}
        # json escapes every control character but this one.
        write(json.dumps(reached).replace("\x7f", "\\u007f"))
        return status.DONE
    rows = [["JOB", "STATE", "REASON", "NODES", "RUN TIME", "LIMIT", "RESTARTS"]]
    rows += [
        [
            str(job[key])
            for key in ("id", "state", "reason", "nodes", "run_time", "limit", "restarts")
        ]
        for job in jobs
    ]
    no_jobs = (
        "Slurm no longer lists any job of this run"
        if ids
        else "no job: the run was started without Slurm"
    )
    write(columns(rows) if jobs else no_jobs)
    print_runs(runs)
    return status.DONE


def job_ids(run: Path) -> list[str]:
    """Return the ids of the run's jobs; empty if `xscale train`, `launch local` or `launch mpi` created the folder."""
    if (run / "config.yaml").is_file() and not (run / "launch" / "jobs.jsonl").is_file():
        return []
    return [entry.id for entry in submitted_jobs(run)]


def print_runs(runs: list["RunProgress"]) -> None:
    """Print the last step of each run, one line per run."""
    for run in runs:
        ended = f", ended: {status.describe(run.status)}" if run.status is not None else ""
        reached = f"step {run.step}, loss {run.loss:.4f}" if run.step is not None else "no step yet"
        write(f"{run.folder}: {reached}{ended}")


def summary(job: dict[str, str]) -> dict[str, object]:
    """Convert one job of `scontrol show job` to the fields that `status` prints."""
    task = job.get("ArrayTaskId")
    return {
        "id": f"{job['ArrayJobId']}_{task}" if task is not None else job["JobId"],
        "state": job["JobState"],
        "reason": job.get("Reason", "None"),
        "nodes": job.get("NodeList", "").replace("(null)", "") or "-",
        "run_time": job.get("RunTime", "-"),
        "limit": job.get("TimeLimit", "-"),
        "restarts": int(job.get("Restarts", "0")),
        "exit": job.get("ExitCode", "-"),
    }


def job_key(job: dict[str, str]) -> str:
    """Return the id of exactly this job: JobId of an array's last task is the id of the array."""
    task = job.get("ArrayTaskId", "")
    return f"{job['ArrayJobId']}_{task}" if task.isdigit() else job["JobId"]


@dataclass(frozen=True)
class RunProgress:
    """The last step of a run."""

    folder: str
    step: int | None = None
    loss: float = math.nan
    status: int | None = None
    """Exit status; None while the run has not ended."""


@dataclass(frozen=True)
class StepMetrics:
    """The values that the launcher reads from a step's line in metrics.jsonl."""

    step: int
    loss: float | None
    """None where the loss was not finite."""


def progress(run: Path) -> RunProgress:
    """Read the last logged step of a run, and its exit status if it has ended."""
    metrics, over = run / "metrics.jsonl", run / "launch" / "over"
    ended = (
        status.parse_status(read_run_file(over).decode(errors="replace"))
        if over.is_file()
        else None
    )
    if over.is_file() and ended is None:
        raise LaunchError(
            f"{over} holds no exit status; `xscale launch resume {run}` removes it and resumes"
        )
    if metrics.is_file():
        for line in reversed(read_run_file(metrics).splitlines()):
            try:
                metric: StepMetrics = decode_json(line, StepMetrics)
            except ValueError:  # an incomplete line, being written, or that of an evaluation
                continue
            return RunProgress(
                str(run), metric.step, math.nan if metric.loss is None else metric.loss, ended
            )
    return RunProgress(str(run), status=ended)


def folders(run: Path) -> list[Path]:
    """Return the run folder, or those of a sweep's members."""
    members = run / "launch" / "members.txt"
    return (
        [Path(line) for line in read_run_file(members).decode().splitlines()]
        if members.is_file()
        else [run]
    )


def show_logs(options: argparse.Namespace) -> int:
    """Print the last lines of a log; with `--follow` also new lines, until the run has no job in the queue."""
    run = options.run.absolute()
    ids = job_ids(run)
    path = log_file(run, ids, options)
    if path is None and not (ids and options.follow):
        raise LaunchError(
            f"{run} has no such output yet: is the job still pending? (xscale launch status {run})"
        )
    if len(members := folders(run)) > 1 and options.member is None:
        say(f"showing member {members[0].name} of {len(members)}; choose another with --member")
    if options.follow and not ids:
        raise LaunchError(f"{run} has no Slurm job to follow; use tail -f {path}")
    log = None if path is None else GrowingLog(path)
    if log is not None:
        write("\n".join(log.read().splitlines()[-options.lines :]))
    if options.follow:
        follow(run, options, log)
    return status.DONE


def follow(run: Path, options: argparse.Namespace, log: "GrowingLog | None") -> None:
    """Print what is appended to a log, and then the logs of the jobs that resume the run."""
    alive = True
    while alive:
        # A job that excluded a bad node has submitted a new job, and a chain has several jobs.
        ids = [entry.id for entry in submitted_jobs(run)]
        alive = any(job["JobState"] in LIVE for job in queue.known_jobs(ids))
        newest = log_file(run, ids, options)
        if log is not None:
            write(log.read(), end="")
        if newest is not None and (log is None or newest != log.path):
            if log is not None:
                say(f"the run resumes in {newest}")
            log = GrowingLog(newest)
            alive = True
        elif alive:
            time.sleep(1.0)


class GrowingLog:
    """A log that grows, read as text; the carriage returns of progress bars end lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        # A character may be written in two parts, and so may the end of a line.
        utf_8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder = io.IncrementalNewlineDecoder(utf_8, translate=True)

    def read(self) -> str:
        """Return what was written since the last call. Errors as `open_run_file`."""
        with open_run_file(self.path, "rb") as file:
            file.seek(self._offset)
            content = file.read()
        self._offset += len(content)
        return self._decoder.decode(content)


def log_file(run: Path, ids: list[str], options: argparse.Namespace) -> Path | None:
    """Return the requested log file, of the newest job that has written one; None if there is none yet.

    Without jobs it is the trainer's log.txt.
    """
    members = folders(run)
    index = 0
    if options.member is not None:
        names = [folder.name for folder in members]
        if options.member not in names:
            raise LaunchError(
                f"the sweep has no member {options.member!r}; choose from {', '.join(names)}"
            )
        index = names.index(options.member)
    if options.rank:
        path = members[index] / "logs" / f"rank-{options.rank}.log"
        return path if path.is_file() else None
    if not ids:
        return path if (path := run / "log.txt").is_file() else None
    array = (run / "launch" / "members.txt").is_file()
    names = [f"{job_id}_{index}.log" if array else f"{job_id}.log" for job_id in reversed(ids)]
    return next(
        (path for name in names if (path := run / "launch" / "output" / name).is_file()), None
    )


def cancel(options: argparse.Namespace) -> int:
    """Cancel every job of the run that has not ended. The workers get SIGTERM first and save."""
    run = options.run.absolute()
    live = [
        job
        for job in queue.known_jobs([entry.id for entry in submitted_jobs(run)])
        if job["JobState"] in LIVE
    ]
    if not live:
        say(f"{run} has no job in the queue")
        return status.DONE
    # Cancel the last job of a chain first: otherwise it would start when the one before it ends.
    for job in reversed(live):
        queue.slurm_command("scancel", job_key(job))
        write(f"cancelled {summary(job)['id']}")
    return status.DONE


def requeue(options: argparse.Namespace) -> int:
    """Requeue the run's running jobs: they save a checkpoint and resume when Slurm starts them again."""
    run = options.run.absolute()
    live = [
        job
        for job in queue.known_jobs([entry.id for entry in submitted_jobs(run)])
        if job["JobState"] == "RUNNING"
    ]
    if not live:
        raise LaunchError(
            f"no job of {run} is running; `xscale launch resume {run}` submits it again"
        )
    if any(job.get("Requeue") == "0" for job in live):
        raise LaunchError(
            f"jobs of {run} cannot be requeued (a chain, or requeue = false): "
            f"`xscale launch cancel {run}`, then `xscale launch resume {run}`"
        )
    for job in live:
        # Only signalled to save: the batch script requeues the job when all workers have saved, whatever KillWait is.
        queue.slurm_command("scancel", "--signal=USR1", job_key(job))
        write(
            f"signalled job {summary(job)['id']} to save; it is requeued when all workers have saved"
        )
    return status.DONE


def resume(options: argparse.Namespace) -> int:
    """Submit the stored script again: the stored code and config, resuming from the last checkpoint."""
    run = options.run.absolute()
    submitted_jobs(run)
    submit.require_idle(run)
    for folder in (run, *folders(run)):
        submit.prepare(folder)
    path = script_path(run)
    more = [f"--dependency=afterany:{options.after}"] if options.after else []
    job_id = submit.sbatch(path, more)
    record_job(run, job_id, path)
    write(f"submitted job {job_id} again from {path}")
    return status.DONE
