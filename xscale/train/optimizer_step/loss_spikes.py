"""Losses that jump or are not finite: the step is skipped, rolled back, or the end of the run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from xscale.core.errors import FaultError
from xscale.core.robust_threshold import spike_threshold
from xscale.nn.ffn.moe.statistics import nonfinite
from xscale.observe import Observer
from xscale.run.state import State
from xscale.settings.settings import TrainConfig
from xscale.step.stepper import StepGradients
from xscale.train.optimizer_step.decision import StepDecision


class SpikeError(FaultError):
    """The loss spiked or is not finite, and the policy is to stop or its limit is reached."""


@dataclass(frozen=True)
class LossSpikes:
    """The policy (see `StepPolicy`) of `train.nonfinite` and `train.spike`."""

    config: TrainConfig
    state: State
    observer: Observer

    def decide(self, gradients: StepGradients) -> StepDecision | None:
        """Decide by the loss, the gradient norm and the losses of the steps before."""
        decision = decide(self.config, self.state.losses, gradients.loss, gradients.grad_norm)
        return None if decision.accepted else decision

    def record(
        self, gradients: StepGradients, decision: StepDecision, means: dict[str, Tensor]
    ) -> None:
        """Remember the loss of an accepted step; count and report another. SpikeError where the run must end."""
        state, train = self.state, self.config
        if decision.accepted:
            state.skipped_in_a_row = 0
            if train.spike.policy != "none":
                state.losses = [*state.losses, gradients.loss][-train.spike.window :]
            return
        if decision.action == "lower_loss_scale":
            return
        state.skipped += 1
        state.skipped_in_a_row += 1
        what = f"step {state.step}: {decision.reason}"
        if routers := nonfinite(means):
            what += f", with non-finite routing in {', '.join(routers)}"
        if decision.action == "stop":
            raise SpikeError(
                f"{what}; the policy is to stop. The last checkpoint is older than this step"
            )
        if decision.action == "rollback":
            return
        self.observer.message(f"{what}; the step is skipped ({state.skipped_in_a_row} in a row)")
        if state.skipped_in_a_row > train.skip_limit:
            count = f"skipped step {state.skipped_in_a_row} in a row; train.skip_limit is {train.skip_limit}"
            raise SpikeError(f"{what}, {count}")


def decide(train: TrainConfig, losses: Sequence[float], loss: float, norm: float) -> StepDecision:
    """Decide about a step by its loss, its gradient norm and the `losses` of the steps before, oldest first."""
    spike = train.spike
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return StepDecision(
            train.nonfinite, f"the loss ({loss}) or the gradient norm ({norm}) is not finite"
        )
    if spike.policy == "none" or len(losses) < spike.window // 2:
        return StepDecision("accept")
    threshold = spike_threshold(losses, spike.deviations, spike.floor)
    if loss <= threshold.limit:
        return StepDecision("accept")
    reason = f"the loss ({loss:.4f}) is a spike: above the threshold {threshold.limit:.4f}; "
    reason += f"the {len(losses)} losses before have median {threshold.median:.4f}"
    return StepDecision(spike.policy, reason)
