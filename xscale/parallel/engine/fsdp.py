"""FSDP engine: torch's `fully_shard` stores parameters and gradients as DTensors; our optimizers update the shards."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from xscale.mesh.collectives import sum_tensor
from xscale.optim.groups import ClipGroup, clip_factor, clip_groups
from xscale.optim.optimizer.optimizer import LocalParameter, Optimizer
from xscale.parallel.config import ParallelConfig
from xscale.parallel.ema import ExponentialMovingAverage
from xscale.parallel.shard import zero
from xscale.parallel.shard.full_tensors import ShardedWeightWriter, free_gathered_weights
from xscale.parallel.shard.sharded import ShardedParameter
from xscale_kernels.squared_norm.op import squared_norm
from xscale_kernels.torch_private import foreach_mul_


@dataclass
class FsdpEngine:
    """The engine (see `protocol.Engine`) whose parameters stay in the model."""

    model: nn.Module
    parallel: ParallelConfig
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
    norm_weights: list[dict[float, list[int]]] = field(init=False, default_factory=list)
    """For each group of `clip_groups`: weight of a gradient's squared norm in the group's -> indices of the gradients
    with that weight."""
    grad_norms: list[float] = field(init=False, default_factory=list)
    """Norm of each group of `clip_groups`, before clipping."""
    gradients: list[Tensor] = field(init=False, default_factory=list)
    """Local gradients of the step, between `reduce_gradients` and `apply` or `discard`."""
    loss_scale: float = field(init=False, default=1.0)
    """Scale of the loss of these gradients."""

    def __post_init__(self) -> None:
        self.trained = [
            parameter for parameter in self.parameters if parameter.parameter.requires_grad
        ]
        names = [parameter.name for parameter in self.trained]
        self.clip_groups: list[ClipGroup] = clip_groups(
            names, self.optimizer.config.groups, self.clip_grad_norm
        )
        for group in self.clip_groups:
            by_weight: dict[float, list[int]] = {}
            for index in group.members:
                # A shard that several ranks replicate counts once.
                weight = (
                    self.trained[index].shards
                    / self.trained[index].copies
                    * self.stages
                    / self.world
                )
                by_weight.setdefault(weight, []).append(index)
            self.norm_weights.append(by_weight)

    def begin_micro_batch(self, *, last: bool) -> None:
        zero.set_gradient_sync(self.model, self.parallel, last=last)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def reduce_gradients(
        self, nats: Tensor, loss_scale: float = 1.0, scalars: Sequence[float] = ()
    ) -> tuple[float, float, list[float]]:
        self.loss_scale = loss_scale
        self.gradients = [_gradient(parameter) for parameter in self.trained]
        squared_norms = [self._squared_norm(by_weight).to(nats) for by_weight in self.norm_weights]
        # The host reads once, all numbers: it waits here for all that the device has to do in the step.
        numbers = [torch.stack((nats / self.repeats, *squared_norms))]
        if scalars:
            # From pinned memory the host does not wait for the copy.
            copied = torch.tensor(scalars, dtype=nats.dtype, pin_memory=nats.is_cuda)
            numbers.append(copied.to(nats.device, non_blocking=True))
        total, *sums = sum_tensor(torch.cat(numbers)).tolist()
        squares, sums_of_scalars = sums[: len(squared_norms)], sums[len(squared_norms) :]
        self.grad_norms = [_root(squared) / loss_scale for squared in squares]
        return total, _root(sum(squares)) / loss_scale, sums_of_scalars

    def group_norms(self) -> dict[str, float]:
        if len(self.clip_groups) == 1:
            return {}
        return {
            group.label: norm for group, norm in zip(self.clip_groups, self.grad_norms, strict=True)
        }

    def set_progress(self, progress: float) -> None:
        self.optimizer.set_progress(progress)

    def apply(self, lr: float, grad_norm: float) -> None:
        norms = [grad_norm] if len(self.clip_groups) == 1 else self.grad_norms
        factors = [
            clip_factor(group.limit, norm)
            for group, norm in zip(self.clip_groups, norms, strict=True)
        ]
        factor = factors[0]
        if any(other != factor for other in factors):
            for group, factor in zip(self.clip_groups, factors, strict=True):
                _scale([self.gradients[index] for index in group.members], factor)
            factor = 1.0
        if factor != 1 or self.loss_scale != 1:
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
        # Modules may have gathered the weights from before the load.
        free_gathered_weights(self.model)
        self.optimizer.restore_weights()

    def begin(self) -> None:
        free_gathered_weights(self.model)
        self.optimizer.adopt_weights()
        if self.ema is not None:
            self.ema.reset()

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        averaged = self.optimizer.averaged_state
        if averaged is None:
            yield
            return
        weights = ShardedWeightWriter(self.model)
        for parameter, value in zip(self.trained, self.optimizer.states()[averaged], strict=True):
            assert value is not None
            weights.write_shard(parameter.parameter, value)
        try:
            yield
        finally:
            free_gathered_weights(self.model)
            self.optimizer.restore_weights()

    def counters(self) -> dict[str, int]:
        return self.optimizer.counters()

    def set_counters(self, counters: dict[str, int]) -> None:
        self.optimizer.set_counters(counters)

    def _squared_norm(self, by_weight: dict[float, list[int]]) -> Tensor:
        """This rank's part of the squared norm of the gradients of one clip group, a scalar."""
        implementation = self.kernel_choices.get("squared_norm")
        parts = [
            weight
            * squared_norm(
                [self.gradients[index] for index in indices], implementation=implementation
            )
            for weight, indices in by_weight.items()
        ]
        return torch.as_tensor(sum(parts), device=self.device)


def _root(squared: float) -> float:
    return math.sqrt(squared) if squared >= 0 else math.nan


def _scale(gradients: list[Tensor], factor: float) -> None:
    if factor != 1 and gradients:
        foreach_mul_(gradients, factor)


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
            f"{prefix}{parameter.name}": parameter.from_local_like(
                value, reduced_dims.get(kind), blocks.get(kind, 1)
            )
            for parameter, value in zip(trained, values, strict=True)
            if value is not None
        }
    return state
