"""FSDP engine: torch's `fully_shard` stores parameters and gradients as DTensors; our optimizers update the shards."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from xscale.mesh.collectives import sum_tensor
from xscale.optim.optimizer.optimizer import LocalParameter, Optimizer
from xscale.parallel.ema import ExponentialMovingAverage, free_gathered_weights
from xscale.parallel.plan import ParallelPlan
from xscale.parallel.sharded import ShardedParameter
from xscale_kernels.squared_norm.op import squared_norm


@dataclass
class FsdpEngine:
    """The engine (see `protocol.Engine`) whose parameters stay in the model."""

    model: nn.Module
    plan: ParallelPlan
    optimizer: Optimizer
    parameters: list[ShardedParameter]
    device: torch.device
    world: int
    clip_grad_norm: float | None
    repeats: int = 1
    """Ranks that find the same loss of the same samples: those of tp."""
    stages: int = 1
    """Pipeline ranks: all read the same samples, and the last ones find the loss."""
    kernel_choices: Mapping[str, str] = field(default_factory=dict)
    """Operator -> the implementation that the recipe names."""
    ema: ExponentialMovingAverage | None = None
    """The moving average of the weights."""
    norm_weights: dict[float, list[int]] = field(init=False, default_factory=dict)
    """Weight of a gradient's squared norm in the global one -> indices of the gradients with that weight."""
    gradients: list[Tensor] = field(init=False, default_factory=list)
    """Local gradients of the step, between `reduce_gradients` and `apply` or `discard`."""
    loss_scale: float = field(init=False, default=1.0)
    """Scale of the loss of these gradients."""

    def __post_init__(self) -> None:
        self.trained = [parameter for parameter in self.parameters if parameter.parameter.requires_grad]
        for index, parameter in enumerate(self.trained):
            # A shard that several ranks replicate counts once.
            weight = parameter.shards / parameter.copies * self.stages / self.world
            self.norm_weights.setdefault(weight, []).append(index)

    def begin_micro_batch(self, *, last: bool) -> None:
        self.plan.set_gradient_sync(self.model, last=last)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def reduce_gradients(self, nats: Tensor, loss_scale: float = 1.0) -> tuple[float, float]:
        self.loss_scale = loss_scale
        self.gradients = [_gradient(parameter) for parameter in self.trained]
        # The host reads once, both numbers: it waits here for all that the device has to do in the step.
        total, squared = sum_tensor(torch.stack((nats / self.repeats, self._squared_norm().to(nats)))).tolist()
        return total, math.sqrt(squared) / loss_scale if squared >= 0 else math.nan

    def set_progress(self, progress: float) -> None:
        self.optimizer.set_progress(progress)

    def apply(self, lr: float, grad_norm: float) -> None:
        clipped = self.clip_grad_norm is not None and grad_norm > self.clip_grad_norm
        if clipped or self.loss_scale != 1:
            factor = self.clip_grad_norm / grad_norm if clipped and self.clip_grad_norm is not None else 1.0
            self.optimizer.scaled_step(self.gradients, lr, factor / self.loss_scale)
        else:
            self.optimizer.step(self.gradients, lr)
        self.discard()

    def discard(self) -> None:
        self.gradients = []
        for parameter in self.trained:
            parameter.parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        averages = {} if self.ema is None else self.ema.state_tensors()
        return full_state(self.parameters, self.optimizer) | averages

    def after_load(self) -> None:
        self.optimizer.restore_weights()

    def begin(self) -> None:
        self.optimizer.adopt_weights()
        if self.ema is not None:
            self.ema.reset()

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        averaged = self.optimizer.averaged_state
        if averaged is None:
            yield
            return
        # Modules may still have gathered the weights from before the exchange.
        free_gathered_weights(self.model)
        with torch.no_grad():
            for parameter, value in zip(self.trained, self.optimizer.states()[averaged], strict=True):
                assert value is not None
                parameter.local.copy_(value)
        try:
            yield
        finally:
            free_gathered_weights(self.model)
            self.optimizer.restore_weights()

    def counters(self) -> dict[str, int]:
        return self.optimizer.counters()

    def set_counters(self, counters: dict[str, int]) -> None:
        self.optimizer.set_counters(counters)

    def _squared_norm(self) -> Tensor:
        """This rank's part of the squared norm of all gradients, a scalar."""
        implementation = self.kernel_choices.get("squared_norm")
        parts = [
            weight * squared_norm([self.gradients[index] for index in indices], implementation=implementation)
            for weight, indices in self.norm_weights.items()
        ]
        return torch.as_tensor(sum(parts), device=self.device)


def _gradient(parameter: ShardedParameter) -> Tensor:
    """The local gradient; zeros where backward did not reach the parameter."""
    gradient = parameter.gradient
    return torch.zeros_like(parameter.local) if gradient is None else gradient


def optimizer_weights(parameters: list[ShardedParameter]) -> list[LocalParameter]:
    """The parameters as an optimizer takes them: matrices and tables have weight decay, gains and biases do not."""
    return [
        LocalParameter(
            parameter.name,
            parameter.local,
            decays=parameter.decays,
            linear_map=parameter.linear_map,
            width_ratio=parameter.width_ratio,
            full_shape=tuple(parameter.parameter.shape),
        )
        for parameter in parameters
    ]


def full_state(parameters: list[ShardedParameter], optimizer: Optimizer) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its single-device name, with its global shape.

    Where the optimizer averages the weights, the model's tensors are the averages.
    """
    state = {f"model.{parameter.name}": parameter.parameter.detach() for parameter in parameters}
    trained = [parameter for parameter in parameters if parameter.parameter.requires_grad]
    reduced_dims, blocks = optimizer.reduced_dims(), optimizer.blocked_states()
    for kind, values in optimizer.states().items():
        prefix = "model." if kind == optimizer.averaged_state else f"optimizer.{kind}."
        state |= {
            f"{prefix}{parameter.name}": parameter.from_local_like(value, reduced_dims.get(kind), blocks.get(kind, 1))
            for parameter, value in zip(trained, values, strict=True)
            if value is not None
        }
    return state
