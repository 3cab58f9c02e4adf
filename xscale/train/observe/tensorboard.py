"""TensorBoard events in the run folder."""

from pathlib import Path
from typing import TYPE_CHECKING

from xscale.train.observe.metrics import step_object
from xscale.train.observe.notation import printable
from xscale.train.observe.observer import Observer, due
from xscale.train.observe.report import EndReport, EvalReport, RunFacts, SampleReport, StepReport

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

NAME = "tensorboard"


class TensorBoard(Observer):
    """Writes scalars and samples into `folder`/tensorboard.

    The load of the experts is written as its least and greatest share times their number (1 is even): a curve for
    each of some hundred experts in each layer is not readable there; report.html draws them all.
    """

    def __init__(self, folder: Path, every_steps: int = 1) -> None:
        self._folder = folder / NAME
        self._every = every_steps
        self._facts: RunFacts | None = None
        self._writer: SummaryWriter | None = None

    def start(self, facts: RunFacts) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._facts = facts
        # Steps that an earlier process logged after the checkpoint are hidden by TensorBoard itself.
        purge = None if facts.resumed_from is None else facts.resumed_from + 1
        self._writer = SummaryWriter(str(self._folder), purge_step=purge)

    def step(self, report: StepReport) -> None:
        assert self._facts is not None
        if not due(report.step, self._every, self._facts):
            return
        for name, value in step_object(report).items():
            if isinstance(value, list):
                total = sum(value) or 1.0
                self._scalar(f"{name}_least", min(value) * len(value) / total, report.step)
                self._scalar(f"{name}_greatest", max(value) * len(value) / total, report.step)
            elif value is not None and name != "step":
                self._scalar(name if "/" in name else f"train/{name}", value, report.step)

    def evaluated(self, report: EvalReport) -> None:
        self._scalar("eval/loss", report.eval_loss, report.step)
        self._scalar("eval/perplexity", report.perplexity, report.step)
        if report.bits_per_byte is not None:
            self._scalar("eval/bits_per_byte", report.bits_per_byte, report.step)

    def sampled(self, report: SampleReport) -> None:
        assert self._writer is not None
        # Four spaces make it code in Markdown, which TensorBoard renders.
        text = printable(report.prompt + report.text).replace("\n", "\n    ")
        self._writer.add_text("sample", f"    {text}", report.step)

    def finish(self, report: EndReport) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _scalar(self, name: str, value: float, step: int) -> None:
        assert self._writer is not None
        self._writer.add_scalar(name, value, step)
