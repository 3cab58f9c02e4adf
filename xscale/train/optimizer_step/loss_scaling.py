"""The scale of the loss over the steps of a float16 run; the state has it. Other number formats scale no loss."""

from dataclasses import dataclass

from torch import Tensor

from xscale.observe import Observer
from xscale.parallel.config import PrecisionConfig
from xscale.parallel.precision.loss_scale import LossScale
from xscale.run.state import State
from xscale.step.stepper import StepGradients
from xscale.train.optimizer_step.decision import StepDecision


@dataclass(frozen=True)
class LossScaling:
    """The policy (see `StepPolicy`) that skips a step whose gradients overflow, and lowers the scale."""

    config: PrecisionConfig
    state: State
    observer: Observer

    @property
    def scale(self) -> float | None:
        """Scale of the loss in the step that comes; None: it is not scaled."""
        scaling = self._scaling()
        return None if scaling is None else scaling.scale

    def decide(self, gradients: StepGradients) -> StepDecision | None:
        """Decide about the step, and set the scale of the next one."""
        scaling = self._scaling()
        if scaling is None:
            return None
        overflow = scaling.overflows(self.config.loss_scale, gradients.loss, gradients.grad_norm)
        following = scaling.after(self.config.loss_scale, overflow=overflow)
        self.state.loss_scale, self.state.loss_scale_steps = following.scale, following.steps
        if not overflow:
            return None
        reason = f"gradients overflow; the loss scale falls from {scaling.scale:g} to {following.scale:g}"
        return StepDecision("lower_loss_scale", reason)

    def record(
        self, gradients: StepGradients, decision: StepDecision, means: dict[str, Tensor]
    ) -> None:
        """Report a step that is skipped for its overflow, which is no fault of the data or the weights."""
        if decision.action == "lower_loss_scale":
            self.observer.message(
                f"step {self.state.step}: {decision.reason}, and the step is skipped"
            )

    def _scaling(self) -> LossScale | None:
        if self.config.compute != "float16":
            return None
        return LossScale(
            self.state.loss_scale or self.config.loss_scale.initial, self.state.loss_scale_steps
        )
