"""The exit statuses of the trainer and the launcher, and the launcher's error for mistakes of the user.

srun and mpirun report too little about an attempt, so its agents record its status as files in a shared folder:
`ended-TASK` holds the status (`DONE` or `RESUMABLE`) of each task whose workers ended well; `fault` holds the first
failure. The file names are read by batch scripts that are already queued, so they do not change.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

DONE = 0
USER_MISTAKE = 2
TOO_LARGE = 3
"""`xscale plan`: the run does not fit into the memory of its devices."""
RESUMABLE = 75
"""Stopped on purpose (signal, time limit, `train.stop_after`) with a checkpoint saved: requeue or start again."""


WAIT_FOR_RANK_0_SECONDS = 30.0
NO_REPORT = 1
"""The status of an attempt when some of its tasks recorded no exit status."""


class LaunchError(Exception):
    """A mistake of the user: sentences that say what is wrong and how to fix it. The launcher exits with status 2."""


def from_returncode(code: int) -> int:
    """Convert `subprocess`'s return code (minus the signal number for a killed process) to a shell's exit status."""
    return 128 - code if code < 0 else code


def describe(status: int) -> str:
    """Describe an exit status in words."""
    if status == DONE:
        return "finished"
    if status == USER_MISTAKE:
        return "rejected the config or the command (status 2)"
    if status == RESUMABLE:
        return "stopped on purpose, can be resumed (status 75)"
    if 128 < status < 128 + signal.NSIG:
        try:
            name = signal.Signals(status - 128).name
        except ValueError:
            return f"ended with status {status}"
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"failed with status {status}"


def worst(statuses: Iterable[int]) -> int:
    """Combine exit statuses: a failure outweighs `USER_MISTAKE`, which outweighs `RESUMABLE`, then `DONE`."""
    every = list(statuses)
    failures = [status for status in every if status not in (DONE, USER_MISTAKE, RESUMABLE)]
    if failures:
        return failures[0]
    for status in (USER_MISTAKE, RESUMABLE):
        if status in every:
            return status
    return DONE


def report_config_refused(attempt: Path, rank_0_refused: bool, has_rank_0: bool) -> None:
    """Record that workers refused the config. Rank 0's message in the job's log is enough.

    A task without rank 0 waits for that message up to `WAIT_FOR_RANK_0_SECONDS`: when one task ends, srun ends the
    others, rank 0 among them.
    """
    attempt.mkdir(parents=True, exist_ok=True)
    if rank_0_refused:
        (attempt / "said").touch()
    end = time.monotonic() + WAIT_FOR_RANK_0_SECONDS
    while not has_rank_0 and not config_refused(attempt) and time.monotonic() < end:
        time.sleep(0.2)


def config_refused(attempt: Path) -> bool:
    """Return whether rank 0 has printed why it refused the config of this attempt."""
    return (attempt / "said").exists()


def record_task(attempt: Path, task: int | None, code: int, message: str) -> int:
    """Record the status of a task and return the exit status that the task itself should have.

    The exit status is 0 for `RESUMABLE` too: srun and mpirun end all tasks as soon as one fails, and a node that has
    saved must not end one that is still saving. `task` is None for a worker of a task, which records failures only.
    """
    attempt.mkdir(parents=True, exist_ok=True)
    if code in (DONE, RESUMABLE):
        if task is not None:
            (attempt / f"ended-{task}").write_text(f"{code}\n")
        elif code == RESUMABLE:
            (attempt / "go_on").touch()
        return DONE
    # The first failure is the cause of the later ones.
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(attempt / "fault", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{code}\n{message}\n")
    return code


def parse_status(text: str) -> int | None:
    """Return the exit status that a file holds; None when it holds none."""
    return int(text) if text.strip().isdecimal() and len(text.strip()) < 4 else None


def read_attempt(attempt: Path, tasks: int, code: int) -> tuple[int, str]:
    """Return the status of an attempt and the cause of its failure ("" without one).

    `tasks` counts the tasks of the attempt; `code` is the exit status of srun or mpirun. The batch script of a Slurm
    job does the same in shell.
    """
    fault = attempt / "fault"
    if fault.is_file():
        first, _, message = fault.read_text(errors="replace").partition("\n")
        recorded = parse_status(first)
        if recorded is None:
            return NO_REPORT, f"{fault} holds no exit status: is the disk full?"
        return recorded, message.strip()
    if code:
        return from_returncode(code), f"mpirun (or srun) {describe(from_returncode(code))}"
    parsed = [parse_status(path.read_text(errors="replace")) for path in attempt.glob("ended-*") if path.is_file()]
    ended = [recorded for recorded in parsed if recorded is not None]
    if len(ended) < tasks:
        return NO_REPORT, f"only {len(ended)} of {tasks} tasks recorded an exit status"
    return (RESUMABLE if RESUMABLE in ended or (attempt / "go_on").exists() else DONE), ""
