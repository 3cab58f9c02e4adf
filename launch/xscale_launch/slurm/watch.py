"""`xscale launch status | logs | cancel | requeue | resume RUN`: the jobs that a run folder remembers."""

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from xscale_launch import status
from xscale_launch.columns import columns
from xscale_launch.errors import LaunchError
from xscale_launch.local import say
from xscale_launch.slurm import queue, record, submit
from xscale_launch.slurm.script import kept_in

LIVE = ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "REQUEUED")


def add_run(parser: argparse.ArgumentParser) -> None:
    """RUN, which all of these take."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the run folder")


def add_status(parser: argparse.ArgumentParser) -> None:
    """The options of `xscale launch status`."""
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def add_logs(parser: argparse.ArgumentParser) -> None:
    """The options of `xscale launch logs`."""
    add_run(parser)
    parser.add_argument("--rank", type=int, help="the output of this rank; by default the job's, which holds rank 0's")
    parser.add_argument("--member", help="the member of a sweep")
    parser.add_argument("--lines", type=int, default=40, help="how much of the end")
    parser.add_argument("--follow", action="store_true", help="go on until the job ends")


def add_resume(parser: argparse.ArgumentParser) -> None:
    """The options of `xscale launch resume`."""
    add_run(parser)
    parser.add_argument("--after", metavar="JOB", help="start when this job has ended")


def show_status(options: argparse.Namespace) -> int:
    """Prints the jobs of a run as Slurm knows them, and how far the run has come."""
    run = options.run.absolute()
    ids = submitted(run)
    runs = [progress(folder) for folder in folders(run)]
    try:
        jobs = [summary(job) for job in queue.known(ids)]
    except LaunchError as error:
        if options.json:
            raise
        print_runs(runs)
        say(f"what Slurm has of it is not known here: {error}")
        return status.DONE
    if options.json:
        print(json.dumps({"run": str(run), "jobs": jobs, "runs": [asdict(one) for one in runs]}))
        return status.DONE
    rows = [["JOB", "STATE", "REASON", "NODES", "RUN TIME", "LIMIT", "RESTARTS"]]
    rows += [
        [str(job[key]) for key in ("id", "state", "reason", "nodes", "run_time", "limit", "restarts")] for job in jobs
    ]
    nothing = "Slurm knows none of this run's jobs any more" if ids else "no job: it was started without a queue"
    print(columns(rows) if jobs else nothing)
    print_runs(runs)
    return status.DONE


def submitted(run: Path) -> list[str]:
    """The ids of the run's jobs; none where `xscale train`, `launch local` or `launch mpi` made the folder."""
    if (run / "config.yaml").is_file() and not (run / "launch" / "jobs.jsonl").is_file():
        return []
    return [one.id for one in record.read(run)]


def print_runs(runs: list["Progress"]) -> None:
    """How far each run has come, a line each."""
    for one in runs:
        ended = f", over: {status.describe(one.status)}" if one.status is not None else ""
        reached = f"step {one.step}, loss {one.loss:.4f}" if one.step is not None else "no step yet"
        print(f"{one.folder}: {reached}{ended}")


def summary(job: dict[str, str]) -> dict[str, object]:
    """One job of `scontrol show job`, in the launcher's words."""
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


def alone(job: dict[str, str]) -> str:
    """What Slurm calls this job and no other: the id of an array's last member is that of the array."""
    task = job.get("ArrayTaskId", "")
    return f"{job['ArrayJobId']}_{task}" if task.isdigit() else job["JobId"]


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    folder: str
    step: int | None = None
    loss: float = math.nan
    status: int | None = None
    """How it ended; None while it has not."""


def progress(run: Path) -> Progress:
    """The last step that the run has written, and how it ended if it did."""
    metrics, over = run / "metrics.jsonl", run / "launch" / "over"
    ended = int(over.read_text()) if over.is_file() else None
    if metrics.is_file():
        for line in reversed(metrics.read_text().splitlines()):
            try:
                said = json.loads(line)
            except ValueError:  # half a line: it is being written
                continue
            if "loss" in said:
                return Progress(str(run), said["step"], said["loss"], ended)
    return Progress(str(run), status=ended)


def folders(run: Path) -> list[Path]:
    """The run's folder, or those of a sweep's members."""
    members = run / "launch" / "members.txt"
    return [Path(line) for line in members.read_text().splitlines()] if members.is_file() else [run]


def show_logs(options: argparse.Namespace) -> int:
    """Prints the end of a log; with `--follow` what comes, until no job of the run is left in the queue."""
    run = options.run.absolute()
    ids = submitted(run)
    path = log_file(run, ids, options)
    if path is None and not (ids and options.follow):
        raise LaunchError(f"{run} has no such output yet: is the job still pending? (xscale launch status {run})")
    if len(members := folders(run)) > 1 and options.member is None:
        say(f"this is {members[0].name}; --member shows another of {len(members)}")
    if options.follow and not ids:
        raise LaunchError(f"no queue knows when {run} ends: tail -f {path}")
    place = 0
    if path is not None:
        text = path.read_bytes()
        print("\n".join(text.decode(errors="replace").splitlines()[-options.lines :]), flush=True)
        place = len(text)
    if options.follow:
        follow(run, options, path, place)
    return status.DONE


def follow(run: Path, options: argparse.Namespace, path: Path | None, place: int) -> None:
    """Prints what is written behind `place` of a log, and then of those of the jobs that take the run over."""
    alive = True
    while alive:
        # A job that left a bad node out has submitted another one, and a chain has several.
        ids = [one.id for one in record.read(run)]
        alive = any(job["JobState"] in LIVE for job in queue.known(ids))
        newest = log_file(run, ids, options)
        if path is not None:
            place = shown_from(path, place)
        if newest is not None and newest != path:
            if path is not None:
                say(f"the run goes on in {newest}")
            path, place = newest, 0
            alive = True
        elif alive:
            time.sleep(1.0)


def shown_from(path: Path, place: int) -> int:
    """Prints the log from a place on; returns the place at which it ends now."""
    with path.open("rb") as file:
        file.seek(place)
        new = file.read()
    print(new.decode(errors="replace"), end="", flush=True)
    return place + len(new)


def log_file(run: Path, ids: list[str], options: argparse.Namespace) -> Path | None:
    """The file that holds what was asked for; None while there is none. The newest job that has written comes first.

    Without jobs it is the trainer's own.
    """
    members = folders(run)
    place = 0
    if options.member is not None:
        names = [folder.name for folder in members]
        if options.member not in names:
            raise LaunchError(f"the sweep has no member {options.member!r}; it has {', '.join(names)}")
        place = names.index(options.member)
    if options.rank:
        path = members[place] / "logs" / f"rank-{options.rank}.log"
        return path if path.is_file() else None
    if not ids:
        return path if (path := run / "log.txt").is_file() else None
    array = (run / "launch" / "members.txt").is_file()
    names = [f"{one}_{place}.log" if array else f"{one}.log" for one in reversed(ids)]
    return next((path for name in names if (path := run / "launch" / "output" / name).is_file()), None)


def cancel(options: argparse.Namespace) -> int:
    """Cancels every job of the run that has not ended. The workers are told first, so that they save."""
    run = options.run.absolute()
    live = [job for job in queue.known([one.id for one in record.read(run)]) if job["JobState"] in LIVE]
    if not live:
        say(f"no job of {run} is in the queue")
        return status.DONE
    # The last of a chain first: else its turn would come as the one before it goes.
    for job in reversed(live):
        queue.ask("scancel", alone(job))
        print(f"cancelled {summary(job)['id']}")
    return status.DONE


def requeue(options: argparse.Namespace) -> int:
    """Puts the run's running jobs back into the queue; they save and go on when their turn comes again."""
    run = options.run.absolute()
    live = [job for job in queue.known([one.id for one in record.read(run)]) if job["JobState"] == "RUNNING"]
    if not live:
        raise LaunchError(f"no job of {run} is running; `xscale launch resume {run}` submits it again")
    if any(job.get("Requeue") == "0" for job in live):
        raise LaunchError(
            f"jobs of {run} were submitted never to be put back (a chain, or requeue = false): "
            f"`xscale launch cancel {run}`, then `xscale launch resume {run}`"
        )
    for job in live:
        # Only asked to save: the batch script itself puts the job back when all have saved, whatever KillWait is.
        queue.ask("scancel", "--signal=USR1", alone(job))
        print(f"asked {summary(job)['id']} to save; it goes back into the queue then")
    return status.DONE


def resume(options: argparse.Namespace) -> int:
    """Submits the kept script again: the code and the config of the first time, the checkpoints of the last."""
    run = options.run.absolute()
    record.read(run)
    submit.idle(run)
    for folder in (run, *folders(run)):
        submit.prepare(folder)
    path = kept_in(run)
    more = [f"--dependency=afterany:{options.after}"] if options.after else []
    job_id = submit.sbatch(path, more)
    record.write(run, job_id, path)
    print(f"submitted job {job_id} again from {path}")
    return status.DONE
