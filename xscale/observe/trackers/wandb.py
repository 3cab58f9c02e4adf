"""Log to Weights & Biases, where its extra is installed."""

import importlib
import uuid
from functools import partial
from pathlib import Path
from typing import Any

from xscale.observe.events import EndReport, RunFacts
from xscale.observe.tracker import Tracker


class Wandb(Tracker):
    """Sends the contents of metrics.jsonl. The package's errors become OSErrors, after which it tries again.

    A resumed run continues the same run of Weights & Biases, by the id in `wandb_id`. Steps that it repeats since
    its checkpoint are there already, and the service keeps their first numbers.
    """

    def __init__(self, folder: Path, project: str, every_steps: int = 1) -> None:
        super().__init__(folder, every_steps, "wandb_id")
        self._project = project
        self._package: Any = None
        self._run: Any = None

    def start(self, facts: RunFacts) -> None:
        self._facts = facts
        self._package = importlib.import_module("wandb")
        self.backlog.add(partial(self._start, facts), 0)

    def _start(self, facts: RunFacts) -> None:
        self.store_id(run_id := self.stored_id() or uuid.uuid4().hex)
        try:
            self._run = self._package.init(
                project=self._project,
                id=run_id,
                resume="allow",
                name=self._folder.name,
                dir=str(self._folder),
                config=dict(facts.config),
                allow_val_change=True,
            )
        except self._package.Error as error:
            raise OSError(f"Weights & Biases: {error}") from error

    def finish(self, report: EndReport) -> None:
        try:
            self.backlog.flush()
        finally:
            run, self._run = self._run, None
            if run is not None:
                run.finish(exit_code=1 if report.reason == "failed" else 0)

    def _log(self, item: dict[str, Any], step: int) -> None:
        try:
            self._run.log(item, step=step)
        except self._package.Error as error:
            raise OSError(f"Weights & Biases: {error}") from error

    def _log_text(self, text: str, step: int) -> None:
        self._log({"sample": text}, step)
