"""Base class of the observers that send the numbers of metrics.jsonl to an experiment tracker."""

import math
from abc import abstractmethod
from pathlib import Path
from typing import Any

from xscale.core.atomic_write import write_atomically
from xscale.observe.events import EvalReport, RunFacts, SampleReport, StepReport, TaskReport
from xscale.observe.format import printable
from xscale.observe.metrics import TASKS, step_object
from xscale.observe.observer import Observer, due


class Tracker(Observer):
    """Passes flat numbers to `_log`. The tracker's id of the run is kept in the run folder, so that a run that is
    requeued goes on in the same curves."""

    def __init__(self, folder: Path, every_steps: int, id_file: str) -> None:
        self._folder, self._every, self._id_file = folder, every_steps, folder / id_file
        self._facts: RunFacts | None = None

    def stored_id(self) -> str | None:
        """Return the tracker's id of this run; None before it has one."""
        return self._id_file.read_text(encoding="utf-8").strip() if self._id_file.is_file() else None

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
        self._log(numbers, report.step)

    def evaluated(self, report: EvalReport) -> None:
        item = {"eval/loss": report.eval_loss, "eval/perplexity": report.perplexity}
        if report.bits_per_byte is not None and math.isfinite(report.bits_per_byte):
            item["eval/bits_per_byte"] = report.bits_per_byte
        if report.ema_eval_loss is not None and math.isfinite(report.ema_eval_loss):
            item["eval/ema_loss"] = report.ema_eval_loss
        item |= {f"eval/{name}": value for name, value in report.metrics.items() if math.isfinite(value)}
        self._log(item, report.step)

    def tasks_evaluated(self, report: TaskReport) -> None:
        results = {f"{TASKS}{name}": value for name, value in report.results.items() if math.isfinite(value)}
        self._log(results, report.step)

    def sampled(self, report: SampleReport) -> None:
        self._log_text(printable(report.prompt + report.text), report.step)

    @abstractmethod
    def _log(self, item: dict[str, Any], step: int) -> None:
        """Log numbers by name; None where one is not known."""

    @abstractmethod
    def _log_text(self, text: str, step: int) -> None:
        """Log text that the model wrote."""
