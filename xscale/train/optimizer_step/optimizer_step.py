"""One optimizer step from its batch to the updated model: everything that changes weights is here, in its order."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from xscale.nn.post_step import update_non_gradient_state
from xscale.nn.segment_state import SegmentStates
from xscale.optim.schedule import Schedule
from xscale.parallel.shard.full_tensors import ShardedWeightWriter
from xscale.run.state import State
from xscale.settings.settings import Settings
from xscale.step.step_batches import StepBatches
from xscale.step.stepper import StepGradients, Stepper
from xscale.train.optimizer_step.decision import StepDecision, StepPolicy, decide_by
from xscale.train.optimizer_step.loss_scaling import LossScaling
from xscale.train.optimizer_step.statistics import StepStatistics
from xscale.watchdog.watchdog import Watchdog


@dataclass(frozen=True)
class TakenStep:
    """A step that is done; the state counts it."""

    gradients: StepGradients
    decision: StepDecision
    lr: float
    means: dict[str, Tensor]
    """The statistics of the step, by name: means over all ranks."""
    seconds: float


@dataclass
class OptimizerStep:
    """Takes the steps of a run, one after the other. Collective."""

    settings: Settings
    state: State
    model: nn.Module
    stepper: Stepper
    schedule: Schedule
    batches: StepBatches
    loss_scaling: LossScaling
    policies: Sequence[StepPolicy]
    """Reasons for which a step is not accepted; the first one counts."""
    statistics: StepStatistics
    watchdog: Watchdog
    scalars: Callable[[], Sequence[float]]
    """Called behind the last backward; what it returns is summed over all ranks with the loss."""
    before_update: Callable[[], object]
    """Called before the weights change."""
    segment_states: SegmentStates | None = None
    """States that the model keeps of this rank's rows between segments; None: it keeps none."""

    def take(self) -> TakenStep:
        """Take the next step: gradients, decision, update, averages of weights, biases. FaultError as a policy says."""
        start = time.perf_counter()
        state, stepper = self.state, self.stepper
        train = self.settings.train
        state.step += 1
        self.watchdog.heartbeat("start", state.step)
        with stepper.timer.phase("data"):
            batch, targets = self.batches.take()
        gradients = stepper.compute_gradients(
            batch.micro_batches, self.loss_scaling.scale, targets, self.scalars
        )
        decision = decide_by(self.policies, gradients)
        lr = self.settings.optimizer.lr * self.schedule.factor(state.step)
        self.before_update()
        self._keep_states(gradients)
        if decision.accepted:
            stepper.apply(gradients, lr, (state.step - 1) / train.steps)
        else:
            stepper.discard()
        state.consumed += train.batch_size
        state.tokens += train.batch_size * self.settings.sample_tokens
        means = self.statistics.means(batch.tally)
        if decision.accepted:
            self._update_without_gradients(means)
        self.watchdog.heartbeat("report")
        for policy in self.policies:
            policy.record(gradients, decision, means)
        return TakenStep(gradients, decision, lr, means, time.perf_counter() - start)

    def _keep_states(self, gradients: StepGradients) -> None:
        """Keep what the model leaves of this step's segments for the next; nothing where the loss is not finite."""
        if self.segment_states is None:
            return
        if math.isfinite(gradients.loss):
            self.segment_states.commit()
        else:
            self.segment_states.reset()

    def _update_without_gradients(self, means: dict[str, Tensor]) -> None:
        """Move what follows the updated weights: biases of routers and their like, then the average of the weights."""
        update_non_gradient_state(self.model, means, ShardedWeightWriter(self.model))
        if (ema := self.stepper.engine.ema) is not None:
            ema.update()
