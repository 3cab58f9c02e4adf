"""The status files of an attempt to run: what its tasks record, in a folder that all nodes share.

srun and mpirun report too little about an attempt, so its agents record its status as files: `ended-TASK` holds the
status (`DONE` or `RESUMABLE`) of each task whose workers ended well; `fault` holds the first failure. The file names
are read by batch scripts that are already queued, so they do not change.
"""

import contextlib
import time
from pathlib import Path

from xscale_launch.files import make_run_folder, open_run_file, read_run_file, write_run_file
from xscale_launch.status import DONE, RESUMABLE, describe, from_returncode, parse_status

WAIT_FOR_RANK_0_SECONDS = 30.0
NO_REPORT = 1
"""The status of an attempt when some of its tasks recorded no exit status."""


def report_config_refused(attempt: Path, rank_0_refused: bool, has_rank_0: bool) -> None:
    """Record that workers refused the config. Rank 0's message in the job's log is enough.

    A task without rank 0 waits for that message up to `WAIT_FOR_RANK_0_SECONDS`: when one task ends, srun ends the
    others, rank 0 among them.
    """
    make_run_folder(attempt.parent, attempt.name)
    if rank_0_refused:
        write_run_file(attempt / "said", "")
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
    make_run_folder(attempt.parent, attempt.name)
    if code in (DONE, RESUMABLE):
        if task is not None:
            write_run_file(attempt / f"ended-{task}", f"{code}\n")
        elif code == RESUMABLE:
            write_run_file(attempt / "go_on", "")
        return DONE
    # The first failure is the cause of the later ones.
    with contextlib.suppress(FileExistsError), open_run_file(attempt / "fault", "xb") as file:
        file.write(f"{code}\n{message}\n".encode())
    return code


def read_attempt(attempt: Path, tasks: int, code: int) -> tuple[int, str]:
    """Return the status of an attempt and the cause of its failure ("" without one).

    `tasks` counts the tasks of the attempt; `code` is the exit status of srun or mpirun. The batch script of a Slurm
    job does the same in shell.
    """
    fault = attempt / "fault"
    if fault.is_file():
        first, _, message = read_run_file(fault).decode(errors="replace").partition("\n")
        recorded = parse_status(first)
        if recorded is None:
            return NO_REPORT, f"{fault} holds no exit status: is the disk full?"
        return recorded, message.strip()
    if code:
        return from_returncode(code), f"mpirun (or srun) {describe(from_returncode(code))}"
    texts = [
        read_run_file(path).decode(errors="replace")
        for path in attempt.glob("ended-*")
        if path.is_file()
    ]
    ended = [recorded for text in texts if (recorded := parse_status(text)) is not None]
    if len(ended) < tasks:
        return NO_REPORT, f"only {len(ended)} of {tasks} tasks recorded an exit status"
    return (RESUMABLE if RESUMABLE in ended or (attempt / "go_on").exists() else DONE), ""
