"""Log to Weights & Biases, where its extra is installed."""

import importlib
import math
from pathlib import Path
from typing import Any

from xscale.observe.events import EndReport, EvalReport, RunFacts, SampleReport, StepReport, TaskReport
from xscale.observe.format import printable
from xscale.observe.metrics import step_object
from xscale.observe.observer import Observer, due


class Wandb(Observer):
    """Sends the contents of metrics.jsonl. The package's errors become OSErrors, which end the observer only."""

    def __init__(self, folder: Path, project: str, every_steps: int = 1) -> None:
        self._folder, self._project, self._every = folder, project, every_steps
        self._facts: RunFacts | None = None
        self._package: Any = None
        self._run: Any = None

    def start(self, facts: RunFacts) -> None:
        self._facts = facts
        self._package = importlib.import_module("wandb")
        try:
            self._run = self._package.init(
                project=self._project, name=self._folder.name, dir=str(self._folder), config=dict(facts.config)
            )
        except self._package.Error as error:
            raise OSError(f"Weights & Biases: {error}") from error

    def step(self, report: StepReport) -> None:
        assert self._facts is not None
        if not due(report.step, self._every, self._facts):
            return
        item = step_object(report)
        lists = {name: value for name, value in item.items() if isinstance(value, list)}
        numbers = {name: value for name, value in item.items() if name not in lists}
        for name, value in lists.items():
            numbers |= {f"{name}/{position}": part for position, part in enumerate(value)}
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
        results = {f"tasks/{name}": value for name, value in report.results.items() if math.isfinite(value)}
        self._log(results, report.step)

    def sampled(self, report: SampleReport) -> None:
        self._log({"sample": printable(report.prompt + report.text)}, report.step)

    def finish(self, report: EndReport) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1 if report.reason == "failed" else 0)
            self._run = None

    def _log(self, item: dict[str, Any], step: int) -> None:
        try:
            self._run.log(item, step=step)
        except self._package.Error as error:
            raise OSError(f"Weights & Biases: {error}") from error
