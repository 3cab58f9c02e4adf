"""Progress of a run for the person who started it: a bar on a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from xscale.core.progress_bar import TerminalBar
from xscale.observe.events import (
    EndReport,
    EvalReport,
    RunFacts,
    SampleReport,
    Statistic,
    StepReport,
    TaskReport,
)
from xscale.observe.format import (
    duration,
    ema_clause,
    metrics_clause,
    overload_lines,
    overloads,
    parameter_shares,
    percentage,
    printable,
    quantity,
    tasks_clause,
)
from xscale.observe.observer import Observer, due

SILENCE_SECONDS = 30.0
"""After so long without a line of a step the next step prints one, whatever its number."""


class Progress(Observer):
    """Prints to `stream` (standard output). `steps` False: only messages, evaluations and samples.

    On a terminal every step moves the bar; elsewhere every `every`-th step prints a line, and each
    that follows 30 s of silence.
    """

    shows_messages = True

    def __init__(
        self, *, steps: bool = True, every: int = 10, stream: TextIO | None = None
    ) -> None:
        self._stream = stream or sys.stdout
        self._steps, self._every = steps, every
        self._facts: RunFacts | None = None
        self._bar: TerminalBar | None = None
        self._first: StepReport | None = None
        self._statistics: Mapping[str, Statistic] = {}
        """Statistics of the last logged step."""
        self._evaluation: EvalReport | None = None
        self._last_line = time.monotonic()

    def start(self, facts: RunFacts) -> None:
        self._facts = facts
        resumed = "" if facts.resumed_from is None else f", resumed from step {facts.resumed_from}"
        shares = parameter_shares(facts.active_parameters, facts.trained_parameters)
        self.message(
            f"{facts.folder}: {quantity(facts.parameters)} parameters ({shares}), "
            f"{quantity(facts.tokens_per_step)} tokens a step, {facts.devices} x {facts.device}{resumed}"
        )
        if self._steps and self._stream.isatty():
            self._bar = TerminalBar(
                "step", facts.last_step, self._stream, completed=facts.first_step - 1, counts=True
            )

    def step(self, report: StepReport) -> None:
        assert self._facts is not None
        self._first = self._first or report
        self._statistics = report.statistics or self._statistics
        if self._bar is not None:
            self._bar.update(report.step, self._summary(report))
        elif self._steps and (
            due(report.step, self._every, self._facts) or self._is_silent_for_long()
        ):
            self._last_line = time.monotonic()
            width = len(str(self._facts.last_step))
            self._print(
                f"step {report.step:>{width}}/{self._facts.last_step}  {self._summary(report)}"
            )

    def evaluated(self, report: EvalReport) -> None:
        self._evaluation = report
        numbers = (
            f"{report.eval_loss:.4f}{_bits(report.bits_per_byte)}{metrics_clause(report.metrics)}"
        )
        self.message(
            f"step {report.step}: validation loss {numbers}{ema_clause(report.ema_eval_loss)}"
        )

    def tasks_evaluated(self, report: TaskReport) -> None:
        self.message(f"step {report.step}: {tasks_clause(report.results)}")

    def sampled(self, report: SampleReport) -> None:
        text = printable(report.prompt + report.text).rstrip().replace("\n", "\n  | ")
        self._print(f"step {report.step}: sample\n  | {text}")

    def message(self, text: str) -> None:
        self._print(printable(text))

    def rolled_back(self, step: int) -> None:
        self._first = None

    def saved(self, step: int, path: Path, seconds: float) -> None:
        self.message(f"step {step}: saved {path} ({duration(seconds)})")

    def finish(self, report: EndReport) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self.message(
            f"{report.reason} at step {report.step}"
            + (f": {report.message}" if report.message else "")
        )
        for line in overload_lines(self._statistics):
            self.message(line)
        last = self._evaluation
        if (
            last is not None
            and (bits := _bits(last.bits_per_byte))
            and report.baseline_bits_per_byte is not None
        ):
            baseline = (
                f"an order-2 byte model of the same text: {report.baseline_bits_per_byte:.4f}"
            )
            self.message(f"validation: {bits.removeprefix(', ')}; {baseline}")

    def _is_silent_for_long(self) -> bool:
        return time.monotonic() - self._last_line > SILENCE_SECONDS

    def _summary(self, report: StepReport) -> str:
        """'loss 2.3104  12.3k tokens/s  MFU 31.2 %  1:02 left'."""
        mfu = "" if report.mfu is None else f"  MFU {percentage(report.mfu)}"
        speed = f"{quantity(report.tokens_per_second)} tokens/s"
        busiest = max(overloads(self._statistics).values(), default=None)
        overload = "" if busiest is None else f"  busiest rank {busiest:.2f}x"
        return f"loss {report.loss:.4f}  {speed}{mfu}{overload}  {self._left(report)}"

    def _left(self, report: StepReport) -> str:
        """Time left at the pace since the first step, which includes pauses for evaluation and saving."""
        assert self._facts is not None
        assert self._first is not None
        done = report.step - self._first.step
        pace = (report.seconds - self._first.seconds) / done if done else report.step_seconds
        return f"{duration(pace * (self._facts.last_step - report.step))} left"

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.print(text)
            return
        encoding = self._stream.encoding or "utf-8"
        # A log file in an old encoding must not end the run because the model generated an accent.
        print(text.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)


def _bits(bits: float | None) -> str:
    return "" if bits is None or not math.isfinite(bits) else f", {bits:.4f} bits per byte"
