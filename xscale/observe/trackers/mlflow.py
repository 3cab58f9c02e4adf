"""Log to MLflow, where its extra is installed."""

import importlib
import re
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

from xscale.core.compose import leaves
from xscale.mesh.environment import bound_mlflow_attempts
from xscale.observe.events import EndReport, RunFacts
from xscale.observe.tracker import Tracker

LONGEST = 500
"""Characters of a parameter's value that every server keeps."""
UNCONFIRMED = 64
"""Most rows that are on their way in the background; the oldest is waited for before another is sent."""
STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
"""Reason of the end -> status in MLflow."""


class Mlflow(Tracker):
    """Sends the contents of metrics.jsonl, and the config as parameters. The package's errors become OSErrors, after
    which it tries again.

    A resumed run continues the same run of MLflow, by the id in `mlflow_id`. Metrics are sent in the background, where
    an error is seen only by who asks: those that failed are sent again.
    """

    def __init__(
        self, folder: Path, experiment: str, uri: str | None, every_steps: int = 1
    ) -> None:
        super().__init__(folder, every_steps, "mlflow_id")
        self._experiment, self._uri = experiment, uri
        self._package: Any = None
        self._run: Any = None
        self._is_new = False
        self._unconfirmed: deque[tuple[dict[str, float], int, Any]] = deque()
        """Numbers, step and operation of the rows that are on their way."""

    def start(self, facts: RunFacts) -> None:
        self._facts = facts
        bound_mlflow_attempts()
        self._package = importlib.import_module("mlflow")
        config = dict(facts.config)
        # Three entries, each of which is tried again by itself: parameters cannot be sent twice.
        for call in (
            partial(self._try, self._start),
            partial(self._log_params, config),
            partial(self._log_config, config, facts.first_step),
        ):
            self.backlog.add(call, 0)

    def _start(self) -> None:
        package = self._package
        if self._run is None:
            run_id = self.stored_id()
            if self._uri is not None:
                package.set_tracking_uri(self._uri)
            package.set_experiment(self._experiment)
            self._run = package.start_run(run_id=run_id, run_name=self._folder.name)
            self._is_new = run_id is None
        if self._is_new:
            self.store_id(self._run.info.run_id)

    def _log_params(self, config: dict[str, Any]) -> None:
        """Send the config; it cannot change afterwards, so that of each process is an artifact too."""
        if self._is_new:
            params = {
                path.removeprefix("."): str(value)[:LONGEST] for path, value in leaves(config, "")
            }
            self._try(self._package.log_params, params)

    def _log_config(self, config: dict[str, Any], first_step: int) -> None:
        self._try(self._package.log_dict, config, f"config/step-{first_step}.yaml")

    def finish(self, report: EndReport) -> None:
        try:
            self.backlog.flush()
            # What fails now is an entry that is missing, each row by itself.
            for _ in tuple(self._unconfirmed):
                self.backlog.add(partial(self._confirm, 1), 0)
            self.backlog.flush()
        finally:
            run, self._run = self._run, None
            if run is not None:
                self._try(self._package.end_run, status=STATUS[report.reason])

    def _log(self, item: dict[str, Any], step: int) -> None:
        known = {
            re.sub(r"[^\w\-. /]", "_", name): float(value)
            for name, value in item.items()
            if value is not None
        }
        if len(self._unconfirmed) >= UNCONFIRMED:
            self._confirm(1)
        self._try(self._send_in_background, known, step)

    def _send_in_background(self, known: dict[str, float], step: int) -> None:
        operation = self._package.log_metrics(known, step=step, synchronous=False)
        self._unconfirmed.append((known, step, operation))

    def _confirm(self, count: int) -> None:
        """Wait until the oldest `count` rows are with the server; one that failed is sent again, now. OSError."""
        for _ in range(min(count, len(self._unconfirmed))):
            known, step, operation = self._unconfirmed[0]
            try:
                self._try(operation.wait)
            except OSError:
                self._try(self._package.log_metrics, known, step=step, synchronous=True)
            self._unconfirmed.popleft()

    def _log_text(self, text: str, step: int) -> None:
        self._try(self._package.log_text, text, f"samples/step-{step}.txt")

    def _try(self, call: Any, *values: Any, **options: Any) -> None:
        try:
            call(*values, **options)
        except (self._package.exceptions.MlflowException, ImportError) as error:
            raise OSError(f"MLflow: {error}") from error
