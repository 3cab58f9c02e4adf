"""One optimizer step: gradients of micro-batches, reduced over all ranks, and the policy for loss spikes."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.profiler import record_function

from xscale.core.errors import FaultError
from xscale.core.robust_threshold import spike_threshold
from xscale.mesh.collectives import sum_scalars
from xscale.objective.objective import Batch, Objective
from xscale.parallel.engine.protocol import Engine
from xscale.parallel.pipeline.executor import Pipeline
from xscale.settings.settings import TrainConfig


class PhaseTimer:
    """Sums seconds by phase: wall time on a CPU, on a GPU the device's time between two events.

    It never waits for the device. A pipeline has a receive in flight there, whose sender may wait for this very rank.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_phase: Callable[[str], object] = str
        """Called with the name of each phase as it begins."""
        self._split: dict[str, float] = {}
        self._totals: dict[str, float] = {}
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        """Phases, as (name, begin, end), that the device may not have finished."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body under `name`."""
        self.on_phase(name)
        with record_function(name):  # the phase's name in a profile
            yield from self._timed(name)

    def _timed(self, name: str) -> Iterator[None]:
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            try:
                yield
            finally:
                end.record()
                self._pending.append((name, begin, end))
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, time.perf_counter() - start)

    def flush(self) -> dict[str, float]:
        """Return the sums so far and reset them to zero. What a GPU has not finished counts in a later call."""
        self._add_finished()
        split, self._split = self._split, {}
        return split

    def totals(self) -> dict[str, float]:
        """Return the sums since the start, of what a GPU has finished."""
        self._add_finished()
        return dict(self._totals)

    def _add_finished(self) -> None:
        while self._pending and self._pending[0][2].query():  # type: ignore[no-untyped-call]
            name, begin, end = self._pending.popleft()
            self._add(name, begin.elapsed_time(end) / 1e3)

    def _add(self, name: str, seconds: float) -> None:
        self._split[name] = self._split.get(name, 0.0) + seconds
        self._totals[name] = self._totals.get(name, 0.0) + seconds


@dataclass(frozen=True)
class StepGradients:
    """Loss and gradient norm of a step whose gradients are reduced and not yet applied."""

    loss: float
    """Mean over the targets of the step, on all ranks, in nats."""
    grad_norm: float
    """Before clipping."""
    targets: int
    loss_scale: float | None = None
    """Scale of the loss in backward; None: it was not scaled."""
    group_norms: Mapping[str, float] = field(default_factory=dict)
    """Gradient norms of the groups that are clipped by themselves, before clipping, by their key in the config."""
    sums: Sequence[float] = ()
    """Sums over all ranks of the numbers that were reduced together with the loss."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass
class Stepper:
    """Computes the gradients of a step and applies or discards them."""

    engine: Engine
    objective: Objective
    device: torch.device
    repeats: int = 1
    """Ranks that find the same loss of the same samples: those of tp and pp."""
    timer: PhaseTimer = field(init=False)

    def __post_init__(self) -> None:
        self.timer = PhaseTimer(self.device)

    def count_targets(self, count: int) -> float:
        """Return the number of targets of a step, of which this rank has `count` in its micro-batches. Collective."""
        return self.targets_of(sum_scalars([float(count)], self.device)[0])

    def targets_of(self, total: float) -> float:
        """Return the number of targets of a step, of which all ranks together found `total`."""
        return total / self.repeats

    def compute_gradients(
        self,
        micro_batches: Sequence[Batch],
        loss_scale: float | None = None,
        targets: float | None = None,
        scalars: Callable[[], Sequence[float]] = tuple,
    ) -> StepGradients:
        """Accumulate the gradients of this rank's micro-batches and reduce them over all ranks.

        They are those of the mean loss over all targets of the step, on every rank and micro-batch together.
        `loss_scale` multiplies the loss in backward, a power of 2 (None: 1); the loss and the norm that are returned
        are without it. `targets` is the number of targets of the step, where that is known; None: it is counted first,
        for which the host waits once more. `scalars` is called behind the last backward; what it returns is summed over
        all ranks in the reduction of the loss.
        """
        scale = 1.0 if loss_scale is None else loss_scale
        if targets is None:
            with self.timer.phase("communicate"):
                targets = self.count_targets(local_targets(micro_batches))
        divisor = max(targets, 1.0)
        micro_batches = [_with_loss_weights(batch, 1 / divisor, scale) for batch in micro_batches]
        nats = self._forward_backward(micro_batches, divisor / scale)
        numbers = scalars()
        with self.timer.phase("communicate"):
            total_nats, grad_norm, sums = self.engine.reduce_gradients(nats, scale, numbers)
        norms = self.engine.group_norms()
        return StepGradients(total_nats / divisor, grad_norm, int(targets), loss_scale, norms, sums)

    def apply(self, gradients: StepGradients, lr: float, progress: float = 0.0) -> None:
        """Clip the gradients and update the parameters; `progress` is the fraction of the run's steps that are done."""
        with self.timer.phase("optimizer"):
            self.engine.set_progress(progress)
            self.engine.apply(lr, gradients.grad_norm)

    def discard(self) -> None:
        """Drop the gradients; the parameters stay as they are."""
        self.engine.discard()

    def step(self, micro_batches: Sequence[Batch], lr: float) -> StepGradients:
        """Compute gradients and apply them where they are finite: a step without a policy for loss spikes."""
        gradients = self.compute_gradients(micro_batches)
        if gradients.finite:
            self.apply(gradients, lr)
        else:
            self.discard()
        return gradients

    def _forward_backward(self, micro_batches: Sequence[Batch], divisor: float) -> Tensor:
        """Sum of the micro-batches' losses as far as this rank finds them, in nats."""
        model = self.engine.model
        model.train()
        if isinstance(model, Pipeline):
            return model.step(micro_batches, self.objective.loss, divisor, self.timer.phase)
        nats = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, batch in enumerate(micro_batches):
            self.engine.begin_micro_batch(last=number == len(micro_batches) - 1)
            with self.timer.phase("forward"):
                loss = self.objective.loss(model, batch)
            with self.timer.phase("backward"):
                self.engine.backward(loss / divisor)
            nats += loss.detach()
        return nats


def _with_loss_weights(batch: Batch, target_weight: float, loss_scale: float) -> Batch:
    """Return the batch with the weights of all losses that its backward adds to that of the objective."""
    auxiliary = batch.tokens.forward.aux_loss_weight
    scaled = None if auxiliary is None else auxiliary * loss_scale
    return replace(
        batch, tokens=batch.tokens.with_forward(target_weight=target_weight * loss_scale, aux_loss_weight=scaled)
    )


def local_targets(micro_batches: Sequence[Batch]) -> int:
    """Return the number of targets of this rank's micro-batches."""
    return sum(int(batch.weight) if batch.counted is None else batch.counted for batch in micro_batches)


Action = Literal["accept", "skip", "rollback", "stop", "lower_loss_scale"]


class SpikeError(FaultError):
    """The loss spiked or is not finite, and the policy is to stop or its limit is reached."""


@dataclass(frozen=True)
class StepDecision:
    """Whether a step updates the parameters; if not, what happens instead and why."""

    action: Action
    reason: str = ""


def decide(train: TrainConfig, losses: Sequence[float], loss: float, norm: float) -> StepDecision:
    """Decide about a step by its loss, its gradient norm and the `losses` of the steps before, oldest first.

    Its arguments are the run's state and sums over all ranks, which are bitwise the same on each: so all ranks decide
    the same, and so does a resumed run.
    """
    spike = train.spike
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return StepDecision(train.nonfinite, f"the loss ({loss}) or the gradient norm ({norm}) is not finite")
    if spike.policy == "none" or len(losses) < spike.window // 2:
        return StepDecision("accept")
    threshold = spike_threshold(losses, spike.deviations, spike.floor)
    if loss <= threshold.limit:
        return StepDecision("accept")
    reason = f"the loss ({loss:.4f}) is a spike: above the threshold {threshold.limit:.4f}; "
    reason += f"the {len(losses)} losses before have median {threshold.median:.4f}"
    return StepDecision(spike.policy, reason)
