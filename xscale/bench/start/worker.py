"""A rank of the run whose start is timed: `xscale train` with a clock around the parts of its start.

`prepare(file, began)` lets the run of this process write the seconds of its phases to `file` after the second step, and
train on. `began` is `time.time()` of the process that started it.
"""

import importlib
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xscale.core.files.atomic_write import write_atomically

TIMED = {
    "xscale.train.setup:init_mesh": "rendezvous",
    "xscale.train.setup:prepare_and_open_data": "data",
    "xscale.train.setup:build_on_meta": "model",
    "xscale.train.setup:ParallelPlan.apply": "model",
    "xscale.train.setup:make_engine": "model",
    "xscale.train.run:resume": "checkpoint",
}
"""A function that a run calls before its first step -> the phase that its time is of."""
STEP = "xscale.train.optimizer_step.optimizer_step:OptimizerStep.take"


class StartClock:
    """Seconds of each phase of a start, and of the first two steps."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.phases: dict[str, float] = defaultdict(float)
        self.steps: list[tuple[float, float]] = []
        """Begin and end of each step."""

    def imported(self) -> None:
        """Note that all modules of a run are imported."""
        self.phases["imports"] = time.time() - self.began

    def timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """Return the function with its time added to `phase`."""

        def call(*arguments: Any, **options: Any) -> Any:
            begin = time.time()
            try:
                return function(*arguments, **options)
            finally:
                self.phases[phase] += time.time() - begin

        return call

    def step(self, function: Callable[..., Any], file: Path) -> Callable[..., Any]:
        """Return the function of a step, which writes the phases to `file` after the second call."""

        def call(*arguments: Any, **options: Any) -> Any:
            begin = time.time()
            result = function(*arguments, **options)
            self.steps.append((begin, time.time()))
            if len(self.steps) == 2:
                write_atomically(file, json.dumps(self.seconds()).encode())
            return result

        return call

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase until the first step ended, their sum as `total`."""
        (_, first_end), (second_begin, second_end) = self.steps
        first = first_end - self.steps[0][0]
        total = first_end - self.began
        known = {**self.phases, "first step": first}
        other = total - sum(known.values())
        later = {"second step": second_end - second_begin, "first step at": first_end}
        return {**known, "other": other, "total": total, **later}


def install(clock: StartClock, file: Path) -> None:
    """Put the clock around what a run calls until its second step."""
    for name, phase in TIMED.items():
        holder, attribute = _holder(name)
        setattr(holder, attribute, clock.timed(getattr(holder, attribute), phase))
    holder, attribute = _holder(STEP)
    setattr(holder, attribute, clock.step(getattr(holder, attribute), file))


def _holder(name: str) -> tuple[Any, str]:
    """The module or class that has the function called `module:function` or `module:Class.function`, and its name."""
    module, _, path = name.partition(":")
    holder: Any = importlib.import_module(module)
    *classes, function = path.split(".")
    for inner in classes:
        holder = getattr(holder, inner)
    return holder, function


def prepare(file: str, began: str) -> None:
    """Import what a run imports, and put the clock around it; `xscale train` follows in this process."""
    clock = StartClock(float(began))
    install(clock, Path(file))
    importlib.import_module("xscale.recipe")
    clock.imported()
