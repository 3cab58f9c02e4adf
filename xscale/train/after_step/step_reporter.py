"""The report of each step to the observers: a row of the metrics, and the kernels that ran in the first."""

import time
from dataclasses import dataclass

from xscale.observe import Observer, StepReport
from xscale.observe.events import Statistic
from xscale.observe.observer import is_due
from xscale.run.parts import RunParts
from xscale.run.state import State
from xscale.train.kernel_log import KernelSelectionLog
from xscale.train.optimizer_step.optimizer_step import TakenStep
from xscale.train.optimizer_step.statistics import logged_values


@dataclass(frozen=True)
class StepReporter:
    """Reports what a step found."""

    parts: RunParts
    state: State
    observer: Observer
    kernel_log: KernelSelectionLog
    """Kernel choices of the first step and of the work between steps."""
    began: float
    """When the process began, by `time.perf_counter`."""

    def report(self, step: TakenStep) -> None:
        """Report the step that is done."""
        parts, state = self.parts, self.state
        train = parts.settings.train
        gradients, seconds = step.gradients, step.seconds
        flops = parts.flops_per_sample * train.batch_size / seconds
        peak = None if parts.peak is None else parts.peak * parts.mesh.rank_info.world
        self.observer.step(
            StepReport(
                step=state.step,
                loss=gradients.loss,
                lr=step.lr,
                grad_norm=gradients.grad_norm,
                tokens=state.tokens,
                seconds=time.perf_counter() - self.began,
                step_seconds=seconds,
                tokens_per_second=train.batch_size * parts.settings.sample_tokens / seconds,
                mfu=None if peak is None else flops / peak,
                split=parts.stepper.timer.flush(),
                statistics=self._statistics(step),
                skipped=state.skipped,
                loss_scale=gradients.loss_scale,
            )
        )

    def report_kernels(self) -> None:
        """Report the kernels that were chosen since the last call."""
        if text := self.kernel_log.drain():
            self.observer.kernels_logged(text)

    def _statistics(self, step: TakenStep) -> dict[str, Statistic]:
        """Read the statistics where they are logged: the host waits for the device there."""
        settings = self.parts.settings
        due = is_due(self.state.step, settings.observe.every_steps, settings.train.steps)
        if not (due and self.parts.mesh.rank_info.is_rank0):
            return {}
        ep = self.parts.mesh.degrees.ep
        return logged_values(step.means, step.gradients.group_norms, ep)
