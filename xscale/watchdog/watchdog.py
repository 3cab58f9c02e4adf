"""The watchdog: a thread that ends the process when its step makes no progress, and names the rank at fault."""

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FrameType, TracebackType
from typing import TypeVar

from xscale.core.errors import EXIT_FAULT, EXIT_REQUEUE, FaultError
from xscale.core.foreign import reason
from xscale.mesh.collectives import SharedCounter
from xscale.mesh.consensus import RankError
from xscale.mesh.flight_recorder import is_lost_rank
from xscale.watchdog.crash_dumps import CrashDumps, frame_of_thread

SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2),
    # A terminal that is closed, and a limit on processor time (`ulimit -t`, queues of LSF and Grid Engine).
    *(signal.SIGHUP, signal.SIGXCPU),
)
INTERRUPTED = 128 + signal.SIGINT
"""The exit status after a second Ctrl-C."""
INTERRUPT_SECONDS = 1.0
"""How long a second Ctrl-C waits for Python's own exception, which cannot be raised while a call into torch runs."""
PAUSE = signal.SIGTSTP
"""Ctrl-Z, and the signal by which Slurm announces that it suspends a job."""
SHOW_CURSOR = "\x1b[?25h"
"""Escape sequence that a progress bar prints at its end; a killed one leaves the cursor hidden."""


class StopSignal:
    """A context that remembers the first of the signals and says at once what follows.

    Before `training_begins` there is nothing to save: a signal raises KeyboardInterrupt. After it a second Ctrl-C ends
    the process at once. A thread reads the signals too, because their handlers wait for the current call into torch.
    """

    def __init__(self, *, speaks: bool = True) -> None:
        """`speaks`: print what follows; of all ranks one does."""
        self.cause: str | None = None
        self.in_training = False
        self.around_pause: Callable[[], contextlib.AbstractContextManager[None]] = (
            contextlib.nullcontext
        )
        """A context of the time in which the process is paused."""
        self._at: float | None = None
        self._before: dict[signal.Signals, object] = {}
        self._speaks = speaks
        self._left = threading.Event()

    @property
    def seconds(self) -> float:
        """Seconds since the first signal; 0 before it."""
        return 0.0 if self._at is None else time.monotonic() - self._at

    def training_begins(self) -> None:
        """From now on a signal lets the step finish."""
        self.in_training = True

    def __enter__(self) -> "StopSignal":
        self._left.clear()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            # A process that nohup started keeps running when its terminal is closed.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._catch)
        if signal.getsignal(PAUSE) == signal.SIG_DFL:
            # The thread pauses the process, which may be in a long call into torch.
            self._before[PAUSE] = signal.signal(PAUSE, lambda *_: None)
        threading.Thread(target=self._announce, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup_before)
        self._left.set()
        self._writer.close()

    def _catch(self, number: int, frame: FrameType | None) -> None:
        is_first = self.cause is None
        self._at = self._at or time.monotonic()
        self.cause = self.cause or signal.Signals(number).name
        if not self.in_training or (number == signal.SIGINT and not is_first):
            raise KeyboardInterrupt

    def _announce(self) -> None:
        """Print what follows each signal, and end a process that a second Ctrl-C cannot interrupt."""
        stop_requested = False
        with self._reader:
            while numbers := self._reader.recv(16):
                if PAUSE in numbers:
                    self._pause()
                for number in (number for number in numbers if number in SIGNALS):
                    if not self.in_training:
                        continue
                    if not stop_requested:
                        stop_requested = True
                        hint = (
                            "; press Ctrl-C again to stop at once, unsaved"
                            if number == signal.SIGINT
                            else ""
                        )
                        self._say(
                            f"{signal.Signals(number).name}: finishing this step, then saving{hint}"
                        )
                    elif number == signal.SIGINT:
                        self._say(
                            "SIGINT again: stopping at once; what was trained since the last save is lost"
                        )
                        if not self._left.wait(INTERRUPT_SECONDS):
                            sys.stderr.write(SHOW_CURSOR if sys.stderr.isatty() else "")
                            sys.stderr.flush()
                            os._exit(INTERRUPTED)

    def _pause(self) -> None:
        """Stop the process until a SIGCONT, as `fg` sends it."""
        with self.around_pause():
            os.kill(os.getpid(), signal.SIGSTOP)

    def _say(self, text: str) -> None:
        # A closed terminal takes no text, and must not end the thread.
        with contextlib.suppress(OSError):
            if self._speaks:
                print(f"xscale: {text}", file=sys.stderr, flush=True)


T = TypeVar("T")
PATIENCE_SECONDS, LONGEST_PATIENCE_SECONDS, RANKS_PER_SECOND = 5.0, 15.0, 100
"""How long to wait for the reports of the other ranks: a second longer for each hundred ranks."""
BACKSTOP_SECONDS = 8.0
"""This much after the timeout, a thread of C prints the stacks and ends a process whose interpreter is stuck."""


class RunningClock:
    """The seconds in which this process ran: time in which it was stopped, as by Ctrl-Z, does not count."""

    def __init__(self) -> None:
        self._stopped = 0.0
        self._at = time.monotonic()

    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic() - self._stopped

    def ticked(self, seconds: float) -> None:
        """Note that a thread has waited for `seconds` since the call before; what went by beyond them was a stop."""
        before, self._at = self._at, time.monotonic()
        self._stopped += max(0.0, self._at - before - seconds)


class LostRankError(FaultError):
    """Another rank has failed or is gone."""


@contextlib.contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Say in a sentence that another rank ended during the set-up, where no watchdog does so yet. LostRankError."""
    try:
        yield
    except RuntimeError as error:
        if not _is_of_lost_rank(error):
            raise
        raise LostRankError(f"{error}. The message of that rank says why") from None


def _is_of_lost_rank(error: Exception) -> bool:
    return isinstance(error, RankError) or is_lost_rank(error)


class Watchdog:
    """A context that watches this process; the thread that enters it must call `heartbeat` as it makes progress."""

    def __init__(
        self,
        dumps: CrashDumps,
        seconds: float,
        stop: StopSignal,
        deadline_seconds: float,
        start_seconds: float | None = None,
    ) -> None:
        """`seconds`: longest time between heartbeats; `start_seconds`: the same until `started`, None: no other.

        `deadline_seconds`: from a signal to the end of the save.
        """
        self._after_start = seconds
        self._seconds = self._limit = (
            seconds if start_seconds is None else max(start_seconds, seconds)
        )
        self._dumps = dumps
        self._stop, self._deadline = stop, deadline_seconds
        self._clock = RunningClock()
        self._at = (0, "start", self._clock.now())
        self._signalled: float | None = None
        self._left = threading.Event()
        self._arming = threading.Lock()
        self._thread: threading.Thread | None = None
        self._watched = threading.get_ident()

    def started(self) -> None:
        """Take the time between heartbeats of a run whose first step is done."""
        self._seconds = self._after_start

    def heartbeat(
        self, phase: str, step: int | None = None, *, seconds: float | None = None
    ) -> None:
        """Report progress: the run is now in `phase` of `step` (None: the same step as before).

        `seconds`: longest time to the next heartbeat; None: as usual.
        """
        self._limit = self._seconds if seconds is None else seconds
        self._at = (self._at[0] if step is None else step, phase, self._clock.now())

    def waits_for(self, message: object | None) -> None:
        """Note the message between two ranks that this rank waits for, None when it has come; its text is `str`."""
        self._dumps.pending_message = message

    def heartbeats(
        self, items: Iterable[T], phase: str, *, seconds: float | None = None
    ) -> Iterator[T]:
        """Yield the items, with a heartbeat before each; `seconds` as in `heartbeat`."""
        for item in items:
            self.heartbeat(phase, seconds=seconds)
            yield item
        self.heartbeat(phase, seconds=seconds)

    def __enter__(self) -> "Watchdog":
        self._watched = threading.get_ident()
        self._clock, self._stop.around_pause = RunningClock(), self._disarmed
        self._at = (*self._at[:2], self._clock.now())
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the thread. An exception is written for the other ranks; one that another rank caused is diagnosed.

        LostRankError when another rank is the cause.
        """
        self._left.set()
        self._stop.around_pause = contextlib.nullcontext
        with self._arming:
            faulthandler.cancel_dump_traceback_later()
        if not isinstance(error, Exception) or self._dumps.world == 1:
            return
        step, phase, since = self._at
        seconds, frame = self._clock.now() - since, _innermost(trace)
        lost = _is_of_lost_rank(error)
        text = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            self._dumps.write("lost" if lost else "failed", step, phase, seconds, frame, text)
            if not lost:
                error.add_note(f"rank {self._dumps.rank} failed at step {step} ({phase})")
                return
            raise LostRankError(self._dumps.conclude(patience(self._dumps.world))) from error

    def _run(self) -> None:
        tick = min(2.0, max(0.05, self._after_start / 20))
        while not self._left.wait(tick):
            self._clock.ticked(tick)
            with self._arming:
                self._arm()
            step, phase, since = self._at
            now = self._clock.now()
            if since > now:
                # A heartbeat after a pause that this thread did not know of yet.
                since, self._at = now, (step, phase, now)
            late = now - since > self._limit
            if late or self._dumps.begun():
                self._end(EXIT_FAULT, partial(self._hang, late))
            elif self._is_overdue():
                self._end(EXIT_REQUEUE, self._overdue)

    def _arm(self) -> None:
        """Let the thread of C count anew, unless the context is left."""
        if not self._left.is_set():
            faulthandler.dump_traceback_later(self._seconds + BACKSTOP_SECONDS, exit=True, file=2)

    @contextlib.contextmanager
    def _disarmed(self) -> Iterator[None]:
        """A pause of the process, in which the thread of C must not count: its clock knows no pause."""
        with self._arming:
            faulthandler.cancel_dump_traceback_later()
            yield
            self._arm()

    def _is_overdue(self) -> bool:
        if self._stop.cause is not None and self._signalled is None:
            self._signalled = self._clock.now() - self._stop.seconds
        return self._signalled is not None and self._clock.now() - self._signalled > self._deadline

    def _hang(self, late: bool) -> str:
        step, phase, since = self._at
        frame = frame_of_thread(self._watched)
        self._dumps.write(
            "hangs" if late else "asked", step, phase, self._clock.now() - since, frame
        )
        return self._dumps.conclude(patience(self._dumps.world))

    def _overdue(self) -> str:
        step, phase, since = self._at
        frame = frame_of_thread(self._watched)
        self._dumps.write("asked", step, phase, self._clock.now() - since, frame)
        return (
            f"the state of step {step} could not be saved within {self._deadline:g} s of {self._stop.cause} "
            f"(checkpoint.deadline_seconds). Run the same command to resume from the checkpoint before it. "
            f"The process was in '{phase}'. Stacks: {self._dumps.folder}"
        )

    def _end(self, status: int, diagnose: Callable[[], str]) -> None:
        """Print why and end the process, unless the watched thread has meanwhile left and reports by itself."""
        try:
            message = diagnose()
        except OSError as error:
            step, phase, _ = self._at
            message = f"no progress in step {step} ({phase}), and its stacks cannot be written: {reason(error)}"
        faulthandler.cancel_dump_traceback_later()
        if self._left.is_set():
            return
        print(f"xscale (rank {self._dumps.rank}): {message}", file=sys.stderr, flush=True)
        os._exit(status)


class IoHeartbeat:
    """Heartbeats of a rank that waits for a save, as long as any rank's disk makes progress."""

    def __init__(
        self, watchdog: Watchdog, progress: SharedCounter, seconds: float | None = None
    ) -> None:
        """`seconds`: longest time in which no disk makes progress; None: that of the watchdog."""
        self._watchdog = watchdog
        self._progress = progress
        self._seconds = seconds
        self._reported, self._sum = 0, 0

    def __call__(self, operations: int) -> None:
        """Take the disk operations that this rank has begun so far."""
        before, self._sum = self._sum, self._progress.add(operations - self._reported)
        self._reported = operations
        if self._sum != before:
            self._watchdog.heartbeat("save", seconds=self._seconds)


def patience(world: int) -> float:
    """Seconds to wait for the reports of `world` ranks."""
    return min(PATIENCE_SECONDS + world / RANKS_PER_SECOND, LONGEST_PATIENCE_SECONDS)


def _innermost(trace: TracebackType | None) -> FrameType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else trace.tb_frame
