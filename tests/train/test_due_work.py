"""The work that is due after a step: in the order of the page, for each kind of step, with the save first at a stop."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from xscale.run.state import State
from xscale.settings.settings import Settings
from xscale.train.after_step.due_work import DueWork
from xscale.train.after_step.run_saver import RunSaver
from xscale.train.interruptible_work import InterruptibleWork, Work
from xscale.train.run_work import RunWork
from xscale.watchdog.distributed_stop import DistributedStop
from xscale.watchdog.watchdog import StopSignal

PAGE = Path(__file__).parents[2] / "docs/architecture/training-loop.md"
STEPS = 8
SETTINGS: dict[str, Any] = {"checkpoint": {"every_steps": 4, "memory_every_steps": 2}}


def page_order() -> list[str]:
    """The names in the table of the page."""
    match = re.search(r"<!-- due -->\n(.*?)<!-- /due -->", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert match
    return [line.strip("|").split("|")[0].strip() for line in match[1].splitlines()[2:]]


class Recorder:
    """The due work of a run whose parts note that they were called."""

    def __init__(self, step: int, *, limit: int | None = None, rollback: bool = False, signal_in: str = "") -> None:
        self.done: list[str] = []
        self.signal_in, self.signal = signal_in, StopSignal()
        self.stop = DistributedStop(self.signal, torch.device("cpu"))
        self.state = State(step=step)
        self.taken: Any = SimpleNamespace(
            decision=SimpleNamespace(action="rollback" if rollback else "accept", reason=""),
            gradients=SimpleNamespace(sums=()),
        )
        settings = Settings(train={"steps": STEPS, "stop_after": limit}, **SETTINGS)  # type: ignore[arg-type]
        self.due = self._due(settings, STEPS if limit is None else limit)

    def _due(self, settings: Settings, last_step: int) -> DueWork:
        parts: Any = SimpleNamespace(settings=settings)
        saver: Any = RunSaver(parts, self.state, *[object()] * 2, None, self.stop, *[None] * 2)  # type: ignore[arg-type,list-item]
        saver.save = lambda must: self._note("save that must succeed" if must else "save")
        saver.save_in_memory = lambda: self._note("copy to memory")
        saver.report_finished = lambda: None
        run_work: Any = RunWork(*[None] * 6)  # type: ignore[arg-type]
        works = {name: Work(lambda: True, self._work(name), work.at_end) for name, work in run_work.table().items()}
        return DueWork(
            train=settings.train,
            state=self.state,
            last_step=last_step,
            stop=self.stop,
            reporter=self._part(report=lambda _: self._note("report"), report_kernels=lambda: None),
            facts=self._part(agree=lambda _, is_good: self._agree()),
            garbage=self._part(after_step=lambda _: self._note("garbage collection")),
            rollback=self._part(restore=lambda _: self._note("rollback"), is_possible=False),
            work=InterruptibleWork(works, self.state, self.stop, nn.Identity()),
            saver=saver,
        )

    @staticmethod
    def _part(**members: Any) -> Any:
        return SimpleNamespace(**members)

    def _work(self, name: str) -> Any:
        return lambda: self._note(name)

    def _note(self, name: str) -> None:
        self.done.append(name)
        if name == self.signal_in:
            self.signal.cause = "SIGTERM"
            self.stop.agree(1)

    def _agree(self) -> None:
        self._note("agree")
        self.stop.agree(float(self.stop.flag))


START = ["report", "agree", "garbage collection"]
WORK = ["profile", "evaluation", "tasks"]
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "a step": ({"step": 1}, [*START, *WORK], []),
    "a step that is saved": ({"step": 4}, [*START, *WORK, "save"], []),
    "a step that is copied to memory": ({"step": 2}, [*START, *WORK, "copy to memory"], []),
    "the last step": ({"step": STEPS}, [*START, *WORK, "save that must succeed", "samples", "bleu"], []),
    "the limit": ({"step": 3, "limit": 3}, [*START, "save that must succeed"], WORK),
    "the limit at the last step": (
        {"step": STEPS, "limit": STEPS},
        [*START, *WORK, "save that must succeed", "samples", "bleu"],
        [],
    ),
    "a signal in the step": ({"step": 3, "signal_in": "report"}, [*START, "save that must succeed"], WORK),
    "a signal in the evaluation": (
        {"step": 3, "signal_in": "evaluation"},
        [*START, "profile", "evaluation", "save that must succeed"],
        ["tasks"],
    ),
    "a signal in the last step": (
        {"step": STEPS, "signal_in": "report"},
        [*START, "save that must succeed"],
        [*WORK, "samples", "bleu"],
    ),
    "a step that is rolled back": ({"step": 4, "rollback": True}, [*START, "rollback"], []),
    "a rollback at the limit": ({"step": 3, "limit": 3, "rollback": True}, [*START, "rollback"], []),
}
"""Kind of step -> how it comes about, what is done after it, what is left to the process that resumes."""


@pytest.mark.parametrize("case", CASES)
def test_each_kind_of_step(case: str) -> None:
    given, done, pending = CASES[case]
    recorder = Recorder(**given)
    recorder.due.after(recorder.taken)
    recorder.due.at_end()
    assert (recorder.done, recorder.state.pending) == (done, pending)
    order = [name.removesuffix(" that must succeed") for name in recorder.done]
    assert order == sorted(order, key=page_order().index), "another order than that of the page"


def test_the_page_has_the_order() -> None:
    due = Recorder(1).due
    names = [name for entry in due.order() for name in entry.names]
    assert [*names, "samples", "bleu"] == page_order()
