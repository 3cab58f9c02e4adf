"""The exit statuses of the trainer and the launcher, and the launcher's error for mistakes of the user."""

import signal
from collections.abc import Iterable

DONE = 0
USER_MISTAKE = 2
TOO_LARGE = 3
"""`xscale plan`: the run does not fit into the memory of its devices."""
RESUMABLE = 75
"""Stopped on purpose (signal, time limit, `train.stop_after`) with a checkpoint saved: requeue or start again."""


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


def parse_status(text: str) -> int | None:
    """Return the exit status that a file holds; None when it holds none."""
    return int(text) if text.strip().isdecimal() and len(text.strip()) < 4 else None
