"""The observer interface, and several observers as one."""

import contextlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar, TextIO

from xscale.observe.events import EndReport, EvalReport, RunFacts, SampleReport, StepReport, TaskReport


class Observer:
    """Sees the run and does not steer it. Its OSErrors end the observer, not the run (`ObserverGroup`)."""

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


def is_due(step: int, every: int, last_step: int) -> bool:
    """Whether to report `step`: every `every`-th, and always the first and the last of a run."""
    return step % every == 0 or step in (1, last_step)


def due(step: int, every: int, facts: RunFacts) -> bool:
    """Whether to report `step` of a run."""
    return is_due(step, every, facts.last_step)


class ObserverGroup(Observer):
    """Passes every call to each observer in order.

    A full disk or a closed terminal (OSError) must neither end weeks of training nor go unseen: the observer is
    removed, the others get a warning as a message, now and again after the end. Any other exception is a bug and is
    raised.
    """

    def __init__(self, observers: Iterable[Observer] = (), fallback: TextIO | None = None) -> None:
        """`fallback` (standard error) gets the warnings where no observer is left that shows messages."""
        self._observers = list(observers)
        self._fallback = fallback
        self._warnings: list[str] = []

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
        if shown < len(self._warnings) or not self._shows_messages():
            self._print(self._warnings)

    def _notify(self, call: Callable[[Observer], None]) -> None:
        for observer in tuple(self._observers):
            # A warning about one observer can remove another one that is still in this loop.
            if observer not in self._observers:
                continue
            try:
                call(observer)
            except OSError as error:
                self._remove(observer, error)

    def _remove(self, observer: Observer, error: OSError) -> None:
        self._observers.remove(observer)
        name = type(observer).__name__.lower()
        warning = f"warning: {name} has stopped ({error}); the run continues without it"
        self._warnings.append(warning)
        self.message(warning)
        if not self._shows_messages():
            self._print([warning])

    def _shows_messages(self) -> bool:
        return any(observer.shows_messages for observer in self._observers)

    def _print(self, warnings: list[str]) -> None:
        with contextlib.suppress(OSError):
            for warning in warnings:
                print(warning, file=self._fallback or sys.stderr, flush=True)
