"""A run that is paused goes on: the time in which a process was stopped is no hang, and no save that took too long."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from xscale.core.errors import EXIT_FAULT, EXIT_REQUEUE
from xscale.watchdog import watchdog
from xscale.watchdog.watchdog import RunningClock, StopSignal, Watchdog

LIMIT, PAUSE = 1.0, 1.6
"""Seconds between heartbeats at most, and of a pause."""


class Dumps:
    """Crash dumps of one process, without files."""

    rank, world, folder = 0, 1, "nowhere"
    pending_message: object = None

    def begun(self) -> bool:
        return False

    def write(self, *given: object) -> None: ...

    def conclude(self, seconds: float) -> str:
        return "no progress"


def beat(dog: Watchdog, seconds: float) -> None:
    """Make progress for that long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        dog.heartbeat("forward")
        time.sleep(0.3)  # A step: the watchdog looks first after a pause.


def goes_on(dog: Watchdog) -> None:
    beat(dog, PAUSE + LIMIT / 2)


def hangs(dog: Watchdog) -> None:
    beat(dog, PAUSE)
    time.sleep(600)


def hangs_before(dog: Watchdog) -> None:
    """Hang from before the pause on, which hides no hang."""
    time.sleep(600)


def saves(dog: Watchdog) -> None:
    """Have a signal before the pause, and end soon after it."""
    os.kill(os.getpid(), signal.SIGTERM)
    beat(dog, PAUSE + LIMIT / 2)


def saves_for_ever(dog: Watchdog) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    beat(dog, 600)


@dataclass
class Case:
    """Work of a run around a pause, the signal that pauses it, and the status of its process."""

    do: Callable[[Watchdog], None]
    number: signal.Signals
    status: int
    backstop: float = 0.1
    """Seconds after the limit at which the thread of C ends a process; it cannot know of a SIGSTOP."""


CASES = {
    "Ctrl-Z": Case(goes_on, signal.SIGTSTP, 0),
    "a frozen container": Case(goes_on, signal.SIGSTOP, 0, backstop=8.0),
    "Ctrl-Z, and then a hang": Case(hangs, signal.SIGTSTP, EXIT_FAULT, backstop=8.0),
    "Ctrl-Z in a hang": Case(hangs_before, signal.SIGTSTP, EXIT_FAULT, backstop=8.0),
    "Ctrl-Z in the last save": Case(saves, signal.SIGTSTP, 0),
    "Ctrl-Z in a save without end": Case(saves_for_ever, signal.SIGTSTP, EXIT_REQUEUE, backstop=8.0),
}
QUICK = ("Ctrl-Z",)
PARAMETERS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in CASES]


def paused(case: Case, ready: Path) -> int:
    """Run the case in a process that is paused once it has begun; return its status."""
    if not (pid := os.fork()):
        watchdog.BACKSTOP_SECONDS = case.backstop
        with StopSignal(speaks=False) as stop, Watchdog(Dumps(), LIMIT, stop, LIMIT) as dog:  # type: ignore[arg-type]
            stop.training_begins()
            ready.touch()
            case.do(dog)
        os._exit(0)
    while not ready.exists():
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(pid, case.number)
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    time.sleep(PAUSE)
    os.kill(pid, signal.SIGCONT)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in CASES]
)
def test_a_paused_run(name: str, tmp_path: Path) -> None:
    assert paused(CASES[name], tmp_path / "ready") == CASES[name].status


def test_what_nohup_or_a_shell_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        with StopSignal(speaks=False):
            assert signal.getsignal(signal.SIGTSTP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTSTP, before)


def test_a_clock_that_counts_only_running_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    clock = RunningClock()
    start = clock.now()
    for passed, counted in ((2.0, 2.0), (3600.0, 4.0), (1.5, 5.5)):
        seconds[0] += passed
        clock.ticked(2.0)
        assert clock.now() - start == counted
