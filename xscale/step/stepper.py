"""Gradients of a step's micro-batches (gradient accumulation), reduced over all ranks, then applied or discarded."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from xscale.mesh.collectives import sum_scalars
from xscale.objective.objective import Batch, Objective
from xscale.parallel.engine.protocol import Engine
from xscale.parallel.pipeline.executor import Pipeline
from xscale.step.micro_batch_graphs import MicroBatchGraphs
from xscale.step.phase_timer import PhaseTimer


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
    graphs: MicroBatchGraphs | None = None
    """Forward and backward as CUDA graphs; None: they are computed kernel by kernel."""
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
                targets = self.count_targets(sum(batch.target_count for batch in micro_batches))
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
            if self.graphs is not None:
                # The backward is in the same graph.
                with self.timer.phase("forward"):
                    nats += self.graphs.compute(batch, divisor)
                continue
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
        batch,
        tokens=batch.tokens.with_forward(
            target_weight=target_weight * loss_scale, aux_loss_weight=scaled
        ),
    )
