"""log.txt: messages and events with their time, and the config and versions of the run."""

import math
from datetime import datetime
from pathlib import Path

import yaml

from xscale.core.files.atomic_write import AppendFile
from xscale.observe.backlog import Backlog
from xscale.observe.events import EndReport, EvalReport, RunFacts, SampleReport, TaskReport
from xscale.observe.format import (
    duration,
    ema_clause,
    metrics_clause,
    parameter_shares,
    printable,
    quantity,
    tasks_clause,
)
from xscale.observe.observer import Observer

LOG_FILE = "log.txt"


class Log(Observer):
    """Appends to `folder`/log.txt, also when the run resumes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOG_FILE
        self._file: AppendFile | None = None
        self.backlog: Backlog[bytes] = Backlog(LOG_FILE, self._append)

    def start(self, facts: RunFacts) -> None:
        begin = (
            "starting" if facts.resumed_from is None else f"resuming from step {facts.resumed_from}"
        )
        self._write(
            f"{begin}; steps {facts.first_step} to {facts.last_step}, {facts.tokens_per_step} tokens each"
        )
        shares = parameter_shares(facts.active_parameters, facts.trained_parameters)
        self._write(
            f"{facts.devices} x {facts.device}; {quantity(facts.parameters)} parameters, "
            f"{shares}; {quantity(facts.flops_per_token)} FLOPs a token"
        )
        self._write(
            "versions: "
            + ", ".join(f"{name} {version}" for name, version in facts.versions.items())
        )
        for note in facts.notes:
            self._write(note)
        config: str = yaml.safe_dump(dict(facts.config), sort_keys=False, allow_unicode=True)
        self._write("config:\n" + config)

    def evaluated(self, report: EvalReport) -> None:
        known = report.bits_per_byte is not None and math.isfinite(report.bits_per_byte)
        bits = f", {report.bits_per_byte:.4f} bits per byte" if known else ""
        perplexity = (
            "" if math.isnan(report.perplexity) else f", perplexity {report.perplexity:.4g}"
        )
        self._write(
            f"step {report.step}: validation loss {report.eval_loss:.4f}{perplexity}{bits}"
            f"{metrics_clause(report.metrics)}{ema_clause(report.ema_eval_loss)} ({duration(report.seconds)})"
        )

    def tasks_evaluated(self, report: TaskReport) -> None:
        self._write(
            f"step {report.step}: {tasks_clause(report.results)} ({duration(report.seconds)})"
        )

    def sampled(self, report: SampleReport) -> None:
        self._write(f"step {report.step}: sample\n{report.prompt}{report.text}")

    def message(self, text: str) -> None:
        self._write(text)

    def kernels_logged(self, text: str) -> None:
        self._write(text)

    def saved(self, step: int, path: Path, seconds: float) -> None:
        self._write(f"step {step}: saved {path} ({duration(seconds)})")

    def finish(self, report: EndReport) -> None:
        self._write(
            f"{report.reason} at step {report.step}"
            + (f": {report.message}" if report.message else "")
        )
        try:
            self.backlog.flush()
        finally:
            file, self._file = self._file, None
            if file is not None:
                file.close()

    def _write(self, text: str) -> None:
        """Write one entry; its further lines are indented, so that every line with a time is an entry."""
        stamp = datetime.now().astimezone().isoformat(timespec="seconds")
        body = printable(text).rstrip().replace("\n", "\n    ")
        entry = f"{stamp} {body}\n".encode()
        self.backlog.add(entry, len(entry))

    def _append(self, entry: bytes) -> None:
        if self._file is None:
            # Messages may come before the start, while the model is built.
            self._file = AppendFile(self._path)
        self._file.write(entry)
