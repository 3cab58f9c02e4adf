"""metrics.jsonl: one object for each logged step and each evaluation, numbers in full precision."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from xscale.core.errors import ConfigError
from xscale.core.files.atomic_write import AppendFile, atomic_write
from xscale.core.files.file_safety import decode_json
from xscale.core.files.run_files import kind_of, open_run_file
from xscale.observe.backlog import Backlog
from xscale.observe.events import EndReport, EvalReport, RunFacts, StepReport, TaskReport
from xscale.observe.observer import Observer, due

METRICS_FILE = "metrics.jsonl"
LINE_BYTES = 16 << 20
"""Longest line that is read; a row of a thousand layers with their experts' loads has some megabytes."""
TASKS = "tasks/"
"""Prefix of the results of tasks."""
COLUMN_OF_WORK = {"evaluation": "eval_loss", "tasks": "tasks_seconds"}
"""A column that only the object of such work has."""


class Metrics(Observer):
    """Appends to `folder`/metrics.jsonl.

    A step's object has `step loss lr grad_norm tokens seconds step_seconds tokens_per_second mfu skipped`, with float16
    `loss_scale`, `split/<phase>` in seconds, and the statistics under their own names; an evaluation's `step eval_loss
    perplexity bits_per_byte eval_seconds`, the metrics of classes as `eval_<name>`, and with `train.ema_decay`
    `ema_eval_loss`; that of tasks `step tasks_seconds` and `tasks/<task>/<metric>`. Non-finite numbers are null, so
    that every JSON reader can read the file.
    """

    def __init__(self, folder: Path, every_steps: int = 1) -> None:
        self._path = folder / METRICS_FILE
        self._every = every_steps
        self._facts: RunFacts | None = None
        self._file: AppendFile | None = None
        self.backlog: Backlog[str | Cut] = Backlog(METRICS_FILE, self._perform)

    def start(self, facts: RunFacts) -> None:
        """Open the file, without what an earlier process wrote after the step that this one resumes from."""
        self._facts = facts
        repeated = tuple(COLUMN_OF_WORK[name] for name in facts.repeats if name in COLUMN_OF_WORK)
        self.backlog.add(Cut(facts.resumed_from, repeated), 0)

    def step(self, report: StepReport) -> None:
        assert self._facts is not None
        if due(report.step, self._every, self._facts):
            self._write(step_object(report))

    def evaluated(self, report: EvalReport) -> None:
        self._write(
            {
                "step": report.step,
                "eval_loss": report.eval_loss,
                "perplexity": report.perplexity,
                "bits_per_byte": report.bits_per_byte,
                "eval_seconds": report.seconds,
                **{f"eval_{name}": value for name, value in report.metrics.items()},
                **({} if report.ema_eval_loss is None else {"ema_eval_loss": report.ema_eval_loss}),
            }
        )

    def tasks_evaluated(self, report: TaskReport) -> None:
        results = {f"{TASKS}{name}": value for name, value in report.results.items()}
        self._write({"step": report.step, **results, "tasks_seconds": report.seconds})

    def rolled_back(self, step: int) -> None:
        self.backlog.add(Cut(step), 0)

    def finish(self, report: EndReport) -> None:
        try:
            self.backlog.flush()
        finally:
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write(self, item: dict[str, Any]) -> None:
        line = json.dumps(finite(item), allow_nan=False) + "\n"
        self.backlog.add(line, len(line))

    def _perform(self, entry: "str | Cut") -> None:
        if isinstance(entry, Cut):
            self._close()
            truncate(self._path, entry)
            return
        if self._file is None:
            self._file = AppendFile(self._path)
        self._file.write(entry)


@dataclass(frozen=True)
class Cut:
    """The removal of the objects after a step; None: of all."""

    step: int | None
    repeated: tuple[str, ...] = ()
    """Columns of work that is repeated: of `step` itself the objects with one of them are removed too."""


def step_object(report: StepReport) -> dict[str, Any]:
    """The object of a step: a flat mapping."""
    item: dict[str, Any] = {
        "step": report.step,
        "loss": report.loss,
        "lr": report.lr,
        "grad_norm": report.grad_norm,
        "tokens": report.tokens,
        "seconds": report.seconds,
        "step_seconds": report.step_seconds,
        "tokens_per_second": report.tokens_per_second,
        "mfu": report.mfu,
        "skipped": report.skipped,
    }
    if report.loss_scale is not None:
        item["loss_scale"] = report.loss_scale
    for phase, seconds in report.split.items():
        item[f"split/{phase}"] = seconds
    assert not item.keys() & report.statistics.keys(), "a statistic has the name of a column"
    return item | dict(report.statistics)


def finite(value: Any) -> Any:
    """`value` with None for every non-finite number, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a metrics.jsonl in order, without lines torn by a crash or a full disk.

    A value that is neither a number, null nor a list of such is left out: nothing else belongs into a page of numbers.
    """
    with _open(path) as file:
        for line, _ in _lines(file):
            if (item := _parse(line.decode(errors="replace"))) is not None:
                yield {key: value for key, value in item.items() if _is_numeric(key, value)}


def truncate(path: Path, cut: Cut) -> None:
    """Keep in `path` only the objects that `cut` leaves, by one cut or rename. Raises OSError.

    What comes after a checkpoint is repeated when it is resumed, and would appear twice.
    """
    if kind_of(path) is None:
        return
    end = _end_of_prefix(path, cut)
    if end is not None:
        # What a run wrote is in the order of its steps; a cut needs no room, which a full disk has not.
        with open_run_file(path, "ab") as file:
            file.truncate(end)
        return
    with BufferedReader(open_run_file(path)) as file, atomic_write(path, "wb") as kept:
        for line, _ in _lines(file):
            if _is_kept(line, cut):
                # Not json.dumps(item): the kept lines must stay byte for byte.
                kept.write(line if line.endswith(b"\n") else line + b"\n")


def _end_of_prefix(path: Path, cut: Cut) -> int | None:
    """Where the lines that are kept end, if they are the first of the file and whole; else None."""
    end = at = 0
    with BufferedReader(open_run_file(path)) as file:
        for line, size in _lines(file):
            if _is_kept(line, cut):
                if end != at or not line.endswith(b"\n"):
                    return None
                end += size
            at += size
    return end


def _is_kept(line: bytes, cut: Cut) -> bool:
    item = _parse(line.decode(errors="replace"))
    if cut.step is None or item is None or item["step"] > cut.step:
        return False
    return bool(item["step"] < cut.step) or not any(column in item for column in cut.repeated)


def _lines(file: BufferedReader) -> Iterator[tuple[bytes, int]]:
    """Yield each line with its size in bytes. One that no run wrote is empty: a file may be one line of gigabytes."""
    while line := file.readline(LINE_BYTES):
        size, last = len(line), line
        while len(last) == LINE_BYTES and not last.endswith(b"\n"):
            last, line = file.readline(LINE_BYTES), b""
            size += len(last)
        yield line, size


def _open(path: Path) -> BufferedReader:
    """Open a metrics.jsonl. ConfigError where it cannot be read, or is no regular file."""
    try:
        return BufferedReader(open_run_file(path))
    except OSError as error:
        fix = "Remove it, or copy the run again."
        raise ConfigError(str(path), f"cannot be read: {error.strerror}", fix) from None


def _parse(line: str) -> dict[str, Any] | None:
    try:
        item = decode_json(line)
    except ValueError:
        return None
    step = item.get("step") if isinstance(item, dict) else None
    return item if type(step) is int and 0 <= step < 2**63 else None


def _is_numeric(key: str, value: Any) -> bool:
    """Whether a value is null, a number that a float can hold, or of a layer (`blocks.0/load`) a list of such."""
    if isinstance(value, list):
        of_layer = "/" in key and not key.startswith("split/")
        return of_layer and bool(value) and all(_is_numeric("", item) for item in value)
    if isinstance(value, int):
        return abs(value) < 2**1000
    return value is None or isinstance(value, float)
