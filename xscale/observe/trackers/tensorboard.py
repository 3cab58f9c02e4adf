"""TensorBoard events in the run folder."""

import math
import os
import time
from io import BytesIO
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata  # type: ignore[import-untyped]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from xscale.core.files.atomic_write import AppendFile
from xscale.observe.backlog import Backlog
from xscale.observe.events import (
    EndReport,
    EvalReport,
    RunFacts,
    SampleReport,
    StepReport,
    TaskReport,
)
from xscale.observe.format import printable
from xscale.observe.metrics import step_object
from xscale.observe.observer import Observer, due

TENSORBOARD_FOLDER = "tensorboard"


class TensorBoard(Observer):
    """Writes scalars and samples into `folder`/tensorboard.

    The load of the experts is written as its minimum and maximum over the mean: a curve for each of some hundred
    experts in each layer is not readable; report.html draws them all.
    """

    def __init__(self, folder: Path, every_steps: int = 1) -> None:
        self._folder = folder / TENSORBOARD_FOLDER
        self._every = every_steps
        self._facts: RunFacts | None = None
        self._file: AppendFile | None = None
        # TensorBoard looks for this name, and reads the files of a folder in the order of their names.
        self._path = self._folder / f"events.out.tfevents.{time.time():017.6f}.{os.getpid()}"
        self.backlog: Backlog[bytes] = Backlog(TENSORBOARD_FOLDER, self._append)

    def start(self, facts: RunFacts) -> None:
        self._facts = facts
        self._write(0, file_version="brain.Event:2")
        # From this step on TensorBoard hides what an earlier process logged.
        self._write(facts.first_step, session_log=SessionLog(status=SessionLog.SessionStatus.START))

    def step(self, report: StepReport) -> None:
        assert self._facts is not None
        if not due(report.step, self._every, self._facts):
            return
        scalars: dict[str, float] = {}
        for name, value in step_object(report).items():
            if isinstance(value, list):
                total = sum(value) or math.nan
                scalars[f"{name}_least"] = min(value) * len(value) / total
                scalars[f"{name}_greatest"] = max(value) * len(value) / total
            elif value is not None and name != "step":
                scalars[name if "/" in name else f"train/{name}"] = value
        self._scalars(scalars, report.step)

    def evaluated(self, report: EvalReport) -> None:
        scalars = {"eval/loss": report.eval_loss, "eval/perplexity": report.perplexity}
        if report.bits_per_byte is not None:
            scalars["eval/bits_per_byte"] = report.bits_per_byte
        if report.ema_eval_loss is not None:
            scalars["eval/ema_loss"] = report.ema_eval_loss
        scalars |= {f"eval/{name}": value for name, value in report.metrics.items()}
        self._scalars(scalars, report.step)

    def tasks_evaluated(self, report: TaskReport) -> None:
        self._scalars(
            {f"tasks/{name}": value for name, value in report.results.items()}, report.step
        )

    def sampled(self, report: SampleReport) -> None:
        # Four spaces make it code in Markdown, which TensorBoard renders.
        text = "    " + printable(report.prompt + report.text).replace("\n", "\n    ")
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        value = Summary.Value(
            tag="sample/text_summary",
            metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
            tensor=TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape),
        )
        self._write(report.step, summary=Summary(value=[value]))

    def rolled_back(self, step: int) -> None:
        self._write(step + 1, session_log=SessionLog(status=SessionLog.SessionStatus.START))

    def finish(self, report: EndReport) -> None:
        try:
            self.backlog.flush()
        finally:
            file, self._file = self._file, None
            if file is not None:
                file.close()

    def _scalars(self, scalars: dict[str, float], step: int) -> None:
        """Write all scalars in one event: one for each takes longer than some steps."""
        known = {name: value for name, value in scalars.items() if math.isfinite(value)}
        values = [Summary.Value(tag=name, simple_value=value) for name, value in known.items()]
        self._write(step, summary=Summary(value=values))

    def _write(self, step: int, **content: Any) -> None:
        """Write one record at once: TensorBoard's own thread would report a full disk too late and twice."""
        event = Event(wall_time=time.time(), step=step, **content)
        record = BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self.backlog.add(record.getvalue(), len(record.getvalue()))

    def _append(self, record: bytes) -> None:
        if self._file is None:
            self._file = AppendFile(self._path)
        self._file.write(record)
