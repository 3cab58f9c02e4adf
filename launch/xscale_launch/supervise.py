"""Runs the workers of one machine: passes signals on, and when one dies ends the others and names the cause."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from xscale_launch import processes, status
from xscale_launch.errors import LaunchError

TICK_SECONDS = 0.05
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Worker:
    """One process: its rank in the world, its command, its whole environment, and the file that takes its output."""

    rank: int
    command: tuple[str, ...]
    environment: dict[str, str]
    log: Path | None = None
    """None leaves stdout and stderr where the launcher's own go, so that a progress bar keeps its terminal."""


@dataclass(frozen=True)
class Patience:
    """How long the launcher waits, in seconds."""

    stop: float = 300.0
    """After a signal, for every worker to finish its step and save."""
    settle: float = 1.0
    """After a worker's fault, for the others to end by themselves (their messages may say more)."""
    mistake: float = 30.0
    """After a worker refused the config, for the others to refuse it too: rank 0 says why, and may be slow to start."""
    failure: float = 15.0
    """From SIGTERM to SIGKILL for those that are left when one died: they often hang in a collective."""
    straggler: float = 600.0
    """After a worker ended well, for the others to end."""


@dataclass(frozen=True)
class Outcome:
    """How the workers of this machine ended: one exit status for all, and the first cause of a fault."""

    status: int
    cause: str = ""
    rank: int | None = None
    """The worker that ended first in a bad way."""
    statuses: dict[int, int] = field(default_factory=dict)
    """How each rank ended."""


class Supervisor:
    """Runs `workers` to their end; `run()` may be called once, from the main thread (it takes over signals).

    `noted`: signals that came before there were workers, see `hold`; they are passed on as soon as there are.
    `deputy`: the workers (torchrun) are themselves supervisors that would die of a signal instead of passing it on, so
    signals go to their children. `stop_signal`: what a worker gets to save and stop, when we are asked to.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        say: Callable[[str], None],
        patience: Patience | None = None,
        deputy: bool = False,
        stop_signal: signal.Signals = signal.SIGTERM,
        noted: list[signal.Signals] | None = None,
    ) -> None:
        self._workers = list(workers)
        self._say = say
        self._deputy = deputy
        self._stop_signal = stop_signal
        self._patience = patience or Patience()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._codes: dict[int, int] = {}
        self._signals = [] if noted is None else noted
        self._asked = False
        self._culprit: int | None = None
        self._killed: set[int] = set()
        self._terminate_at: float | None = None
        self._kill_at: float | None = None

    def run(self) -> Outcome:
        """Starts the workers and returns when none is left, however they end."""
        with self._signals_taken():
            try:
                for worker in self._workers:
                    self._processes[worker.rank] = start(worker, deaf=self._deputy)
                while len(self._codes) < len(self._workers):
                    self._collect()
                    self._answer_signals()
                    self._enforce()
                    time.sleep(TICK_SECONDS)
            finally:
                self._kill_the_rest()
        statuses = {rank: status.from_returncode(code) for rank, code in self._codes.items()}
        return replace(self._outcome(), statuses=statuses)

    @contextlib.contextmanager
    def _signals_taken(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(signal.Signals(number))

        # What was ignored when we started (nohup, a shell's background job) stays so; but for SIGUSR1, see `_prepared`.
        taken = [one for one in PASSED_ON if signal.getsignal(one) != signal.SIG_IGN or one == signal.SIGUSR1]
        before = {number: signal.signal(number, note) for number in taken}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _running(self) -> list[int]:
        return [rank for rank in self._processes if rank not in self._codes]

    def _collect(self) -> None:
        """Notes who ended since the last look, and what that means for those still running."""
        ended = {rank: code for rank in self._running() if (code := self._processes[rank].poll()) is not None}
        self._codes |= ended
        now = time.monotonic()
        # Among those that ended in one tick a killed process is the likelier cause than one that lost its peer.
        for rank, code in sorted(ended.items(), key=lambda item: item[1]):
            if self._culprit is not None or self._asked:
                continue
            if code in (status.DONE, status.GO_ON):
                self._terminate_at = self._terminate_at or now + self._patience.straggler
                continue
            self._culprit = rank
            wait = self._patience.mistake if code == status.USER_MISTAKE else self._patience.settle
            self._terminate_at = now + wait

    def _answer_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if not self._asked and self._culprit is None:
                self._asked = True
                self._kill_at = time.monotonic() + self._patience.stop
                sent = number if number == signal.SIGUSR1 else self._stop_signal
                more = "; Ctrl-C again ends them now" if number == signal.SIGINT else ""
                self._say(f"{number.name}: asked {len(self._running())} worker(s) to save and stop{more}")
                self._send(sent)
            elif number not in (signal.SIGUSR1, signal.SIGUSR2):
                self._kill_at = time.monotonic()

    def _enforce(self) -> None:
        now = time.monotonic()
        if self._terminate_at is not None and now >= self._terminate_at and not self._asked and self._kill_at is None:
            if self._culprit is None:
                self._culprit = self._running()[0] if self._running() else None
            self._send(signal.SIGTERM)
            self._kill_at = now + self._patience.failure
        if self._kill_at is not None and now >= self._kill_at:
            self._killed |= set(self._running())
            self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        for rank in self._running():
            pid = self._processes[rank].pid
            below = processes.children(pid) if self._deputy else []
            # SIGKILL goes to the worker's whole group, so that its data-loading children do not outlive it.
            with contextlib.suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(pid, number)
                elif not below:
                    os.kill(pid, number)
            for child in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, number)

    def _kill_the_rest(self) -> None:
        self._send(signal.SIGKILL)
        for rank in self._running():
            self._codes[rank] = self._processes[rank].wait()
        for rank, code in self._codes.items():
            if code not in (status.DONE, status.GO_ON):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._processes[rank].pid, signal.SIGKILL)

    def _outcome(self) -> Outcome:
        if self._culprit is not None:
            rank = self._culprit
            code = status.from_returncode(self._codes[rank])
            if rank in self._killed:
                return Outcome(code, f"rank {rank} hung after the others had ended", rank)
            return Outcome(code, f"rank {rank} {status.describe(code)}", rank)
        # A signal that comes before the trainer is ready for it ends a worker at once: asked to stop, it stopped.
        fine = {-signal.SIGTERM, -signal.SIGUSR1} if self._asked else set()
        left = {rank: status.from_returncode(code) for rank, code in self._codes.items() if code not in fine}
        total = status.worst(left.values())
        if self._asked and self._killed and total not in (status.DONE, status.GO_ON):
            rank = min(self._killed)
            return Outcome(
                total, f"rank {rank} did not save and stop within {self._patience.stop:g} s, or was not let to", rank
            )
        if total in (status.DONE, status.GO_ON):
            return Outcome(status.GO_ON if self._asked and len(left) < len(self._codes) else total)
        rank = next(rank for rank, code in left.items() if code == total)
        return Outcome(total, f"rank {rank} {status.describe(total)}", rank)


def hold(number: signal.Signals) -> list[signal.Signals]:
    """From now on this process does not die of `number` but notes it in the returned list, for a `Supervisor`.

    Who asks a job to save while its nodes are still being looked at does not want that to count as a crash.
    """
    noted: list[signal.Signals] = []
    signal.signal(number, lambda came, frame: noted.append(signal.Signals(came)))
    return noted


def start(worker: Worker, deaf: bool = False) -> subprocess.Popen[bytes]:
    """Starts one worker in a process group of its own, so that Ctrl-C reaches it through the launcher only.

    `deaf` makes it ignore SIGUSR1, which a cluster may send to every process of a job.
    """
    output = None
    if worker.log is not None:
        worker.log.parent.mkdir(parents=True, exist_ok=True)
        output = worker.log.open("ab")
    try:
        return subprocess.Popen(
            worker.command,
            env=worker.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            process_group=0,
            preexec_fn=_prepared(deaf),
        )
    except OSError as error:
        raise LaunchError(
            f"{worker.command[0]} cannot be started: {error.strerror}; give the path of a Python"
        ) from None
    finally:
        if output is not None:
            output.close()


def _prepared(deaf: bool) -> Callable[[], None]:
    """What a worker does before it becomes one.

    It asks the kernel for a SIGTERM when the launcher dies, even by SIGKILL: the worker saves and ends.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def prepare() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if deaf:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    return prepare


def last_lines(log: Path, lines: int = 15) -> str:
    """The end of a worker's log; what cannot be read is said instead."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 16384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"({log} cannot be read: {error.strerror})"
