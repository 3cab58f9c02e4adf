"""Base class of the observers that send the numbers of metrics.jsonl to an experiment tracker."""

import errno
import math
import re
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from xscale.core.files.atomic_write import write_atomically
from xscale.core.files.run_files import kind_of, read_run_file
from xscale.observe.backlog import Backlog
from xscale.observe.events import EvalReport, RunFacts, SampleReport, StepReport, TaskReport
from xscale.observe.format import printable
from xscale.observe.metrics import TASKS, step_object
from xscale.observe.observer import Observer, due

LONGEST_PAUSE = 1 << 30
"""An attempt to reach a server may take minutes: each failure doubles the pause before the next, without an end."""
ID_BYTES = 512
ID = re.compile(r"[A-Za-z0-9][\w-]{0,127}", re.ASCII)
NUMBER_BYTES = 128
"""Bytes that a number with its name takes in memory, about."""


class Tracker(Observer):
    """Passes flat numbers to `_log`, in order, and again after an OSError.

    The tracker's id of the run is kept in the run folder, so that a run that is requeued continues the same curves.
    """

    def __init__(self, folder: Path, every_steps: int, id_file: str) -> None:
        self._folder = folder
        self._every = every_steps
        self._id_file = folder / id_file
        self._facts: RunFacts | None = None
        name = type(self).__name__
        self.backlog: Backlog[Callable[[], None]] = Backlog(
            name, lambda call: call(), LONGEST_PAUSE
        )

    def stored_id(self) -> str | None:
        """Return the tracker's id of this run; None before it has one. OSError, also where the file holds no id."""
        if kind_of(self._id_file) is None:
            return None
        text = read_run_file(self._id_file, ID_BYTES).decode(errors="replace").strip()
        # Clients make names of files and addresses of it.
        if not ID.fullmatch(text):
            raise OSError(errno.EINVAL, "this is not the id of a run", str(self._id_file))
        return text

    def store_id(self, run_id: str) -> None:
        """Keep the tracker's id of this run."""
        if run_id != self.stored_id():
            write_atomically(self._id_file, f"{run_id}\n")

    def step(self, report: StepReport) -> None:
        assert self._facts is not None
        if not due(report.step, self._every, self._facts):
            return
        numbers: dict[str, Any] = {}
        for name, value in step_object(report).items():
            if isinstance(value, list):
                numbers |= {f"{name}/{position}": part for position, part in enumerate(value)}
            else:
                numbers[name] = value
        self._send(numbers, report.step)

    def evaluated(self, report: EvalReport) -> None:
        item = {"eval/loss": report.eval_loss, "eval/perplexity": report.perplexity}
        if report.bits_per_byte is not None and math.isfinite(report.bits_per_byte):
            item["eval/bits_per_byte"] = report.bits_per_byte
        if report.ema_eval_loss is not None and math.isfinite(report.ema_eval_loss):
            item["eval/ema_loss"] = report.ema_eval_loss
        item |= {
            f"eval/{name}": value for name, value in report.metrics.items() if math.isfinite(value)
        }
        self._send(item, report.step)

    def tasks_evaluated(self, report: TaskReport) -> None:
        results = {
            f"{TASKS}{name}": value
            for name, value in report.results.items()
            if math.isfinite(value)
        }
        self._send(results, report.step)

    def sampled(self, report: SampleReport) -> None:
        text = printable(report.prompt + report.text)
        self.backlog.add(partial(self._log_text, text, report.step), len(text))

    def _send(self, item: dict[str, Any], step: int) -> None:
        self.backlog.add(partial(self._log, item, step), NUMBER_BYTES * len(item))

    @abstractmethod
    def _log(self, item: dict[str, Any], step: int) -> None:
        """Log numbers by name; None where one is not known."""

    @abstractmethod
    def _log_text(self, text: str, step: int) -> None:
        """Log text that the model wrote."""
