"""The exit statuses that a trainer and its launcher agree on, and how several of them make one."""

import signal
from collections.abc import Iterable

DONE = 0
USER_MISTAKE = 2
GO_ON = 75
"""Stopped on purpose (a signal, a time limit, `train.stop_after`) with everything saved: start me again."""


def from_returncode(code: int) -> int:
    """A shell's status for `subprocess`'s return code, which is minus the signal's number for a killed process."""
    return 128 - code if code < 0 else code


def describe(status: int) -> str:
    """The status in words, for a person."""
    if status == DONE:
        return "finished"
    if status == USER_MISTAKE:
        return "refused: the config or the command is wrong (status 2)"
    if status == GO_ON:
        return "stopped on purpose, can go on (status 75)"
    if 128 < status < 128 + signal.NSIG:
        try:
            name = signal.Signals(status - 128).name
        except ValueError:
            return f"ended with status {status}"
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"failed with status {status}"


def worst(statuses: Iterable[int]) -> int:
    """The status of a whole run: a fault outweighs the user's mistake, that `GO_ON`, and that `DONE`."""
    kept = list(statuses)
    faults = [status for status in kept if status not in (DONE, USER_MISTAKE, GO_ON)]
    if faults:
        return faults[0]
    for status in (USER_MISTAKE, GO_ON):
        if status in kept:
            return status
    return DONE
