"""Optimizers: update the local shard of each parameter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from xscale.core import config as schema
from xscale.core.config import NonNegativeFloat
from xscale.core.registry import Family
from xscale.optim.full_tensors import FullTensors, UnshardedTensors
from xscale.optim.groups import ParameterGroup, describe_groups, group_of, lr_factors
from xscale_kernels.torch_private import foreach_mul_


@dataclass(frozen=True)
class OptimizerTraits:
    """Properties of an optimizer."""

    states_per_parameter: int
    """State values per element of a matrix, without factored ones, which grow with rows plus columns."""
    elementwise: bool
    """Each element is updated independently, so any shard of a parameter can be updated alone."""


@dataclass(frozen=True)
class LocalParameter:
    """The local shard of one parameter, as the optimizer sees it."""

    name: str
    value: Tensor
    """Updated in place."""
    decays: bool
    """Whether weight decay applies: to matrices and tables, not to gains and biases."""
    linear_map: bool = False
    """Whether it is the matrix [outputs, inputs] of a linear map, or a stack of them [experts, outputs, inputs]."""
    width_ratio: float = 1.0
    """Width over base width, by which muP scales the learning rate; 1 without muP and for vector-like weights."""
    full_shape: tuple[int, ...] | None = None
    """Shape of the full weight, of which `value` may be a shard; None: it is the full weight."""


class Optimizer:
    """Built as `Optimizer(config, weights)`; states start as zeros or as the weights, so that a checkpoint loads before
    a step."""

    requires: ClassVar[Mapping[str, str]] = {}
    """Package that the optimizer needs -> the command that installs it."""
    averaged_state: ClassVar[str | None] = None
    """Name of the state whose values are evaluated and saved in place of the weights; None: the weights are."""

    class Config(schema.Config):
        lr: NonNegativeFloat = 1e-3
        """Peak learning rate; the schedule scales it."""
        weight_decay: NonNegativeFloat = 0.1
        """Decoupled weight decay of matrices and tables."""
        groups: tuple[ParameterGroup, ...] = ()
        """Parameter groups by name: each has a pattern `match`, an `lr_factor`, a `weight_decay` and a
        `clip_grad_norm`; the first whose pattern matches a parameter's name applies to it."""

    def __init__(self, config: Any, weights: list[LocalParameter]) -> None:
        self.config = config
        self.weights = weights
        indices = [group_of(weight.name, config.groups) for weight in weights]
        groups = [None if index is None else config.groups[index] for index in indices]
        self.group_of_weight = groups
        """The parameter group of each weight; None: it is in none."""
        self.mup_factors = [self._mup_factor(weight) for weight in weights]
        """Multiplier of the learning rate of each weight by its width."""
        self.lr_factors = self._lr_factors(0.0)
        """Multiplier of the learning rate of each weight, by its group and its width."""
        self.weight_decays = [
            (
                (config.weight_decay if weight.decays else 0.0)
                if group is None or group.weight_decay is None
                else group.weight_decay
            )
            / factor
            for weight, group, factor in zip(weights, groups, self.mup_factors, strict=True)
        ]
        """Weight decay of each weight. Its product with the learning rate does not depend on the width."""
        self.kernel_choices: Mapping[str, str] = {}
        """Operator -> the implementation that the recipe names."""
        self.full_tensors: FullTensors = UnshardedTensors([weight.value for weight in weights])
        """Access to the full tensors of the weights; an engine that shards them sets its own."""

    @classmethod
    def describe(cls, config: Any, weights: list[LocalParameter]) -> list[str]:
        """Return lines for the log on how the full model's weights, which may be on meta, are updated."""
        return describe_groups(
            config.groups, {weight.name: weight.value.numel() for weight in weights}
        )

    @classmethod
    def mup_exponent(cls, config: Any, *, linear_map: bool) -> float | None:
        """Return e: muP divides the learning rate of a weight of a `width_ratio` by its e-th power; None: no rule.

        `linear_map`: of the matrices between hidden states; else of routers and classifiers.
        """
        return None

    def _mup_factor(self, weight: LocalParameter) -> float:
        """Return the multiplier of the learning rate of a weight by its width."""
        if weight.width_ratio == 1:
            return 1.0
        exponent = self.mup_exponent(self.config, linear_map=weight.linear_map)
        assert exponent is not None, "a recipe with model.mup refuses optimizers without a rule"
        return float(weight.width_ratio**-exponent)

    def _lr_factors(self, progress: float) -> list[float]:
        by_group = lr_factors(self.group_of_weight, progress)
        return [
            factor * by_width for factor, by_width in zip(by_group, self.mup_factors, strict=True)
        ]

    def set_progress(self, progress: float) -> None:
        """Set the learning rates of the groups to those after the fraction `progress` of the run's steps."""
        factors = self._lr_factors(progress)
        if factors != self.lr_factors:
            self.lr_factors = factors
            self.regroup()

    def regroup(self) -> None:
        """Follow a change of `lr_factors`."""

    def step(self, gradients: list[Tensor], lr: float) -> None:
        """Update every weight in place; `gradients` are in the order of the weights."""
        raise NotImplementedError

    def scaled_step(self, gradients: list[Tensor], lr: float, scale: float) -> None:
        """Do `step` on the gradients times `scale`; may leave them scaled."""
        foreach_mul_(gradients, scale)
        self.step(gradients, lr)

    def adopt_weights(self) -> None:
        """Begin with the weights as they are now: they may have been loaded after the optimizer was built."""

    def restore_weights(self) -> None:
        """Set the weights that the states determine, after a checkpoint was loaded or the average evaluated."""

    def states(self) -> Mapping[str, Sequence[Tensor | None]]:
        """State name -> one tensor per weight, None where a weight has no such state; loading writes into them.

        A tensor has the weight's shape, without the dim that `reduced_dims` names, and with a last dim of whole blocks
        where `blocked_states` says so.
        """
        raise NotImplementedError

    def reduced_dims(self) -> Mapping[str, int]:
        """Name of each state that is a mean over a dim of the weight -> that dim, counted from the last as -1."""
        return {}

    def blocked_states(self) -> Mapping[str, int]:
        """Name of each state with one value for a block of elements of the last dim -> elements of a block."""
        return {}

    def counters(self) -> dict[str, int]:
        """State that belongs to no weight."""
        return {}

    def set_counters(self, counters: dict[str, int]) -> None:
        """Restore the counters of a checkpoint."""


OPTIMIZERS = Family("optimizer", OptimizerTraits, Optimizer)


def zeros_like_values(weights: list[LocalParameter]) -> list[Tensor]:
    return [torch.zeros_like(weight.value) for weight in weights]
