"""The observer interface, and several observers as one."""

import contextlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, TextIO

from xscale.core.foreign import reason
from xscale.observe.backlog import Backlog
from xscale.observe.events import (
    EndReport,
    EvalReport,
    RunFacts,
    SampleReport,
    StepReport,
    TaskReport,
)


class Observer:
    """Sees the run and does not steer it. Its OSErrors end no run (`ObserverGroup`)."""

    backlog: "Backlog[Any] | None" = None
    """Entries that it could not write; None: it keeps none, and the first that fails ends it."""
    shows_messages: ClassVar[bool] = False
    """Whether it shows messages to the person who started the run, while it runs."""

    def start(self, facts: RunFacts) -> None:
        """The loop is about to take its first step."""

    def step(self, report: StepReport) -> None:
        """A step is done."""

    def evaluated(self, report: EvalReport) -> None:
        """A pass over the validation data is done."""

    def tasks_evaluated(self, report: TaskReport) -> None:
        """Tasks are evaluated."""

    def sampled(self, report: SampleReport) -> None:
        """The model wrote text."""

    def message(self, text: str) -> None:
        """A message for the person who started the run."""

    def kernels_logged(self, text: str) -> None:
        """Kernel selections, for the log only."""

    def saved(self, step: int, path: Path, seconds: float) -> None:
        """The checkpoint of `step` is saved at `path`; the loop waited `seconds` for it."""

    def rolled_back(self, step: int) -> None:
        """The run rolled back to its checkpoint of `step`: reports on later steps are void."""

    def folder_lost(self) -> None:
        """The run folder is gone: nothing more is to be written to it."""

    def finish(self, report: EndReport) -> None:
        """The last call."""

    def unwritten(self) -> str:
        """Which entries could not be written, for a sentence; empty: all are."""
        return ""


def is_due(step: int, every: int, last_step: int) -> bool:
    """Whether to report `step`: every `every`-th, and always the first and the last of a run."""
    return step % every == 0 or step in (1, last_step)


def due(step: int, every: int, facts: RunFacts) -> bool:
    """Whether to report `step` of a run."""
    return is_due(step, every, facts.last_step)


class ObserverGroup(Observer):
    """Passes every call to each observer in order.

    A full disk or a closed terminal (OSError) must neither end weeks of training nor go unseen. An observer with a
    backlog tries again: a message says when that begins, another when all is written. One without is removed with a
    message. What is lost is said again at the end. Any other exception is a bug and is raised.
    """

    def __init__(self, observers: Iterable[Observer] = (), fallback: TextIO | None = None) -> None:
        """`fallback` (standard error) gets the warnings where no observer is left that shows messages."""
        self._observers = list(observers)
        self._fallback = fallback
        self._warnings: list[str] = []
        self._failing: set[Observer] = set()
        """Observers that keep what they cannot write, of which that is said."""
        self._ended: list[Observer] = []
        """Observers that were removed."""

    def add(self, observer: Observer) -> None:
        self._observers.append(observer)

    @property
    def warnings(self) -> tuple[str, ...]:
        """One for each removed observer."""
        return tuple(self._warnings)

    def start(self, facts: RunFacts) -> None:
        self._notify(lambda observer: observer.start(facts))

    def step(self, report: StepReport) -> None:
        self._notify(lambda observer: observer.step(report))

    def evaluated(self, report: EvalReport) -> None:
        self._notify(lambda observer: observer.evaluated(report))

    def tasks_evaluated(self, report: TaskReport) -> None:
        self._notify(lambda observer: observer.tasks_evaluated(report))

    def sampled(self, report: SampleReport) -> None:
        self._notify(lambda observer: observer.sampled(report))

    def message(self, text: str) -> None:
        self._notify(lambda observer: observer.message(text))

    def kernels_logged(self, text: str) -> None:
        self._notify(lambda observer: observer.kernels_logged(text))

    def saved(self, step: int, path: Path, seconds: float) -> None:
        self._notify(lambda observer: observer.saved(step, path, seconds))

    def rolled_back(self, step: int) -> None:
        self._notify(lambda observer: observer.rolled_back(step))

    def folder_lost(self) -> None:
        # One that writes files would make the folder anew.
        self._observers = [observer for observer in self._observers if observer.shows_messages]

    def finish(self, report: EndReport) -> None:
        for warning in self.warnings:
            self.message(warning)
        shown = len(self._warnings)
        self._notify(lambda observer: observer.finish(report))
        for observer in [
            observer for observer in (*self._observers, *self._ended) if _missing(observer)
        ]:
            error = None if observer.backlog is None else observer.backlog.error
            self._warnings.append(
                f"warning: {_missing(observer)} could not be written"
                + (f" ({reason(error)})" if error else "")
            )
            self.message(self._warnings[-1])
        if shown < len(self._warnings) or not self._shows_messages():
            self._print(self._warnings)

    def unwritten(self) -> str:
        ended = [
            _missing(observer) or f"the end of {observer.backlog.what}"
            for observer in self._ended
            if observer.backlog is not None
        ]
        return ", ".join([*filter(None, map(_missing, self._observers)), *ended])

    def _notify(self, call: Callable[[Observer], None]) -> None:
        for observer in tuple(self._observers):
            # A warning about one observer can remove another one that is still in this loop.
            if observer not in self._observers:
                continue
            try:
                call(observer)
            except OSError as error:
                self._remove(observer, error)
            else:
                self._compare_errors(observer)

    def _compare_errors(self, observer: Observer) -> None:
        """Say that an observer begins to keep what it cannot write, or that it has written it."""
        backlog = observer.backlog
        if backlog is None or (backlog.error is None) == (observer not in self._failing):
            return
        if backlog.error is not None:
            self._failing.add(observer)
            what = f"{backlog.what} cannot be written ({reason(backlog.error)})"
            self._say(f"warning: {what}; what is new is kept in memory, and tried again")
            return
        self._failing.discard(observer)
        ending = (
            f"; {_missing(observer)} could not be kept"
            if backlog.missing
            else ", and nothing is missing"
        )
        self._say(f"{backlog.what} is written again{ending}")

    def _remove(self, observer: Observer, error: OSError) -> None:
        self._observers.remove(observer)
        self._ended.append(observer)
        name = type(observer).__name__.lower()
        warning = f"warning: {name} has stopped ({reason(error)}); the run continues without it"
        self._warnings.append(warning)
        self._say(warning)

    def _say(self, text: str) -> None:
        """Send a message that a person sees, wherever that is."""
        self.message(text)
        if not self._shows_messages():
            self._print([text])

    def _shows_messages(self) -> bool:
        return any(observer.shows_messages for observer in self._observers)

    def _print(self, warnings: list[str]) -> None:
        with contextlib.suppress(OSError):
            for warning in warnings:
                print(warning, file=self._fallback or sys.stderr, flush=True)


def _missing(observer: Observer) -> str:
    """'3 entries of metrics.jsonl'; empty: none is missing."""
    backlog = observer.backlog
    if backlog is None or not backlog.missing:
        return ""
    return f"{backlog.missing} {'entry' if backlog.missing == 1 else 'entries'} of {backlog.what}"
