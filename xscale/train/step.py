"""One optimizer step: micro-batches forward and backward, the norm, clipping, the update."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from xscale.mesh.collectives import sum_scalars
from xscale.objective import Batch, Objective
from xscale.optim.optimizer import Optimizer, Weight
from xscale.parallel.pipeline.executor import Pipeline
from xscale.parallel.plan import Plan
from xscale.parallel.rest import Rest
from xscale.train.clock import Clock


@dataclass
class Stepper:
    """What a step needs, put together once."""

    model: nn.Module
    plan: Plan
    objective: Objective
    optimizer: Optimizer
    rests: list[Rest]
    device: torch.device
    world: int
    clip: float | None
    repeats: int = 1
    """Ranks that find the same loss of the same samples: those of tp."""
    stages: int = 1
    """Ranks that share the depth: all read the same samples, and the last ones find the loss."""
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(self.device)

    def step(self, batches: Sequence[Batch], lr: float) -> "Stepped":
        """Run the micro-batches of this rank and update the parameters, unless the loss or gradient is not finite.

        Gradients are those of the mean loss over all targets of the step, on every rank and micro-batch together.
        """
        clock = self.clock
        with clock.phase("communicate"):
            targets = float(sum(int(batch.weight) for batch in batches))
            weight = sum_scalars([targets], self.device)[0] / (self.repeats * self.stages)
        nats = self._nats(batches, max(weight, 1.0))
        with clock.phase("communicate"):
            gradients = [self._gradient(rest) for rest in self.rests]
            norms = torch.stack(torch._foreach_norm(gradients)).double().tolist()
            # A part that several ranks keep alike counts once.
            alike = self.world / self.stages
            local = sum(norm**2 * rest.parts / rest.held for norm, rest in zip(norms, self.rests, strict=True)) / alike
            total, squared = sum_scalars([float(nats) / self.repeats, local], self.device)
        loss_value, norm = total / max(weight, 1.0), math.sqrt(squared) if squared >= 0 else math.nan
        finite = math.isfinite(loss_value) and math.isfinite(norm)
        if finite:
            with clock.phase("optimizer"):
                if self.clip is not None and norm > self.clip:
                    torch._foreach_mul_(gradients, self.clip / norm)
                self.optimizer.step(gradients, lr)
        for rest in self.rests:
            rest.parameter.grad = None
        return Stepped(loss_value, norm, finite, int(weight))

    def _nats(self, batches: Sequence[Batch], weight: float) -> Tensor:
        """Forward and backward of this rank's micro-batches; the sum of their losses as far as it is found here."""
        self.model.train()
        if isinstance(self.model, Pipeline):
            return self.model.step(batches, self.objective.loss, weight, self.clock.phase)
        nats = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, batch in enumerate(batches):
            self.plan.micro_batch(self.model, last=number == len(batches) - 1)
            with self.clock.phase("forward"):
                loss = self.objective.loss(self.model, batch)
            with self.clock.phase("backward"):
                (loss / weight).backward()  # type: ignore[no-untyped-call]
            nats += loss.detach()
        return nats

    def _gradient(self, rest: Rest) -> Tensor:
        gradient = rest.gradient
        return torch.zeros_like(rest.local) if gradient is None else gradient


@dataclass(frozen=True)
class Stepped:
    """What came of a step."""

    loss: float
    """Mean over the step's targets, in nats."""
    gradient_norm: float
    finite: bool
    """Whether the parameters were updated."""
    targets: int


def weights_of(rests: list[Rest]) -> list[Weight]:
    """The parameters as an optimizer sees them: matrices and tables decay, gains and biases do not."""
    return [Weight(rest.name, rest.local, decays=len(rest.axes) > 1) for rest in rests]
