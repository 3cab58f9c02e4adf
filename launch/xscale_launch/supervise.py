"""Run the workers of one machine: forward signals, and when one worker fails stop the others and report the cause."""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from xscale_launch import status
from xscale_launch.files import open_append, open_run_file
from xscale_launch.status import LaunchError

TICK_SECONDS = 0.05
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1
STOP_VARIABLE = "XSCALE_STOP_SECONDS"
"""Tells a worker how long the launcher waits for it after a signal."""


@dataclass(frozen=True)
class Worker:
    """A worker process: its global rank, command, complete environment, and the file for its output."""

    rank: int
    command: tuple[str, ...]
    environment: dict[str, str]
    log: Path | None = None
    """None inherits the launcher's stdout and stderr, so that a progress bar keeps its terminal."""
    cpus: frozenset[int] = frozenset()
    """The CPUs that it is bound to, those near its GPU; empty: those of the launcher."""


@dataclass(frozen=True)
class Timeouts:
    """The launcher's timeouts, in seconds."""

    stop: float = 300.0
    """After a signal, for every worker to finish its step and save."""
    after_failure: float = 1.0
    """After a worker failed, for the others to end by themselves (their messages may say more)."""
    config_error: float = 30.0
    """After a worker rejected the config, for the others to reject it too: rank 0 prints why, and may start slowly."""
    kill: float = 15.0
    """From SIGTERM to SIGKILL for the remaining workers after a failure: they often hang in a collective."""
    straggler: float = 600.0
    """After a worker ended well, for the others to end."""


@dataclass(frozen=True)
class SupervisorResult:
    """How the workers of this machine ended: one exit status for all, and the first cause of a failure."""

    status: int
    cause: str = ""
    rank: int | None = None
    """The rank that failed first."""
    statuses: dict[int, int] = field(default_factory=dict)
    """Exit status of each rank."""


class Supervisor:
    """Runs `workers` until they end; `run()` may be called once, from the main thread (it installs signal handlers).

    `pending_signals`: signals that arrived before the workers started (see `hold_signal`); they are forwarded then.
    `signal_children`: the workers (torchrun) are supervisors that would die of a signal instead of forwarding it, so
    signals are sent to their children. `stop_signal`: the signal on which a worker saves and stops.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        say: Callable[[str], None],
        timeouts: Timeouts | None = None,
        signal_children: bool = False,
        stop_signal: signal.Signals = signal.SIGTERM,
        pending_signals: list[signal.Signals] | None = None,
    ) -> None:
        self._workers = list(workers)
        self._say = say
        self._signal_children = signal_children
        self._stop_signal = stop_signal
        self._timeouts = timeouts or Timeouts()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._codes: dict[int, int] = {}
        self._signals = [] if pending_signals is None else pending_signals
        self._stop_requested = False
        self._failed_rank: int | None = None
        self._killed: set[int] = set()
        self._terminate_at: float | None = None
        self._kill_at: float | None = None

    def run(self) -> SupervisorResult:
        """Start the workers and return when all have ended."""
        with self._handle_signals():
            try:
                for worker in self._workers:
                    # The trainer compares it with the time that a save may take.
                    variables = {**worker.environment, STOP_VARIABLE: f"{self._timeouts.stop:g}"}
                    started = start_worker(
                        replace(worker, environment=variables), ignore_usr1=self._signal_children
                    )
                    self._processes[worker.rank] = started
                while len(self._codes) < len(self._workers):
                    self._collect()
                    self._forward_signals()
                    self._enforce_timeouts()
                    time.sleep(TICK_SECONDS)
            finally:
                self._kill_remaining()
        statuses = {rank: status.from_returncode(code) for rank, code in self._codes.items()}
        return replace(self._result(), statuses=statuses)

    @contextlib.contextmanager
    def _handle_signals(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(signal.Signals(number))

        # Signals ignored at start (nohup, a shell's background job) stay ignored, except SIGUSR1 (see `_preexec`).
        handled = [
            number
            for number in FORWARDED_SIGNALS
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGUSR1
        ]
        previous = {number: signal.signal(number, note) for number in handled}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _running(self) -> list[int]:
        return [rank for rank in self._processes if rank not in self._codes]

    def _collect(self) -> None:
        """Record the workers that ended, and set the timeout of those still running."""
        ended = {
            rank: code
            for rank in self._running()
            if (code := self._processes[rank].poll()) is not None
        }
        self._codes |= ended
        now = time.monotonic()
        # Among workers that ended in one tick, a killed one is the likelier cause than one that lost its peer.
        for rank, code in sorted(ended.items(), key=lambda item: item[1]):
            if self._failed_rank is not None or self._stop_requested:
                continue
            if code in (status.DONE, status.RESUMABLE):
                self._terminate_at = self._terminate_at or now + self._timeouts.straggler
                continue
            self._failed_rank = rank
            wait = (
                self._timeouts.config_error
                if code == status.USER_MISTAKE
                else self._timeouts.after_failure
            )
            self._terminate_at = now + wait

    def _forward_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if not self._stop_requested and self._failed_rank is None:
                self._stop_requested = True
                self._kill_at = time.monotonic() + self._timeouts.stop
                sent = number if number == signal.SIGUSR1 else self._stop_signal
                hint = "; press Ctrl-C again to kill them" if number == signal.SIGINT else ""
                running = len(self._running())
                count = "1 worker" if running == 1 else f"{running} workers"
                self._say(f"{number.name}: signalled {count} to save and stop{hint}")
                self._send(sent)
            elif number not in (signal.SIGUSR1, signal.SIGUSR2):
                self._kill_at = time.monotonic()

    def _enforce_timeouts(self) -> None:
        now = time.monotonic()
        if (
            self._terminate_at is not None
            and now >= self._terminate_at
            and not self._stop_requested
            and self._kill_at is None
        ):
            if self._failed_rank is None:
                self._failed_rank = self._running()[0] if self._running() else None
            self._send(signal.SIGTERM)
            self._kill_at = now + self._timeouts.kill
        if self._kill_at is not None and now >= self._kill_at:
            self._killed |= set(self._running())
            self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        for rank in self._running():
            pid = self._processes[rank].pid
            child_pids = children(pid) if self._signal_children else []
            # SIGKILL goes to the worker's whole group, so that its data-loading children do not outlive it.
            with contextlib.suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(pid, number)
                elif not child_pids:
                    os.kill(pid, number)
            for child in child_pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, number)

    def _kill_remaining(self) -> None:
        self._send(signal.SIGKILL)
        for rank in self._running():
            self._codes[rank] = self._processes[rank].wait()
        for rank, code in self._codes.items():
            if code not in (status.DONE, status.RESUMABLE):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._processes[rank].pid, signal.SIGKILL)

    def _result(self) -> SupervisorResult:
        if self._failed_rank is not None:
            rank = self._failed_rank
            code = status.from_returncode(self._codes[rank])
            if rank in self._killed:
                return SupervisorResult(
                    code, f"rank {rank} hung after the other workers had ended", rank
                )
            return SupervisorResult(code, f"rank {rank} {status.describe(code)}", rank)
        # Before the trainer installs its handlers, a signal kills a worker at once, which counts as a requested stop.
        requested = {-signal.SIGTERM, -signal.SIGUSR1} if self._stop_requested else set()
        statuses = {
            rank: status.from_returncode(code)
            for rank, code in self._codes.items()
            if code not in requested
        }
        total = status.worst(statuses.values())
        if self._stop_requested and self._killed and total not in (status.DONE, status.RESUMABLE):
            rank = min(self._killed)
            return SupervisorResult(
                total,
                f"rank {rank} was killed before it saved (limit {self._timeouts.stop:g} s after the signal)",
                rank,
            )
        if total in (status.DONE, status.RESUMABLE):
            return SupervisorResult(
                status.RESUMABLE
                if self._stop_requested and len(statuses) < len(self._codes)
                else total
            )
        rank = next(rank for rank, code in statuses.items() if code == total)
        return SupervisorResult(total, f"rank {rank} {status.describe(total)}", rank)


def hold_signal(number: signal.Signals) -> list[signal.Signals]:
    """Record the signal `number` in the returned list, for a `Supervisor`, instead of dying of it.

    A signal to save that arrives during the preflight must not count as a crash.
    """
    pending_signals: list[signal.Signals] = []
    signal.signal(number, lambda received, frame: pending_signals.append(signal.Signals(received)))
    return pending_signals


def start_worker(worker: Worker, ignore_usr1: bool = False) -> subprocess.Popen[bytes]:
    """Start a worker in its own process group, so that Ctrl-C reaches it through the launcher only.

    A cluster may send SIGUSR1 to every process of a job; `ignore_usr1` makes the worker ignore it.
    """
    output = None
    if worker.log is not None:
        output = open_append(worker.log)
    try:
        return subprocess.Popen(
            worker.command,
            env=worker.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            process_group=0,
            preexec_fn=_preexec(ignore_usr1, worker.cpus),
        )
    except OSError as error:
        raise LaunchError(
            f"{worker.command[0]} cannot be started: {error.strerror}; give the path of a Python"
        ) from None
    finally:
        if output is not None:
            output.close()


def _preexec(ignore_usr1: bool, cpus: frozenset[int]) -> Callable[[], None]:
    """Return what runs in a worker before exec.

    It requests a SIGTERM from the kernel when the launcher dies, even by SIGKILL: the worker saves and ends. And it may
    open as many files as the system lets it: a connection of a process group is one, and 1,024 is a usual soft limit.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)

    def prepare() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if ignore_usr1:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        if cpus:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cpus)

    return prepare


def last_lines(log: Path, lines: int = 15) -> str:
    """Return the last lines of a worker's log, or why it cannot be read."""
    try:
        with open_run_file(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 16384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"({log} cannot be read: {error.strerror})"
    except LaunchError as error:
        return f"({error})"


def children(pid: int) -> list[int]:
    """Return the process ids of the direct children of `pid`, which may not forward signals; empty without /proc."""
    pids: list[int] = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in brackets, may contain spaces and brackets: the fields follow the last bracket.
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if int(fields[1]) == pid:
            pids.append(int(entry.parent.name))
    return pids
