"""Shazeer and Stern 2018 (Adafactor): second moments factored into means over rows and columns, and clipped updates.

As T5 and the Switch Transformer use it: no momentum, steps relative to the size of each weight. The moments of a matrix
[..., outputs, inputs] are the outer product of its row and column means (algorithm 4); gains and biases have full ones
(algorithm 5). A stack of experts is one weight, whose matrices have row and column means of their own.
"""

import torch
from torch import Tensor

from xscale.core.config import FractionBelowOne, NonNegativeFloat, PositiveFloat
from xscale.optim.full_tensors import LocalSum
from xscale.optim.optimizer.optimizer import OPTIMIZERS, LocalParameter, Optimizer, OptimizerTraits


@OPTIMIZERS.register(
    "adafactor",
    traits=OptimizerTraits(states_per_parameter=0, elementwise=False),
    deviations=(
        "The last two dims are factored, as in torch.optim.Adafactor; the paper's matrices have no others.",
        "With beta1 the running mean is that of clipped updates, which the learning rate scales afterwards.",
    ),
)
class Adafactor(Optimizer):
    class Config(Optimizer.Config):
        lr: NonNegativeFloat = 1e-2
        """Peak learning rate, relative to the root mean square of each weight with `scale_parameter`; the schedule
        scales it."""
        weight_decay: NonNegativeFloat = 0.0
        """Decoupled weight decay of matrices and tables."""
        scale_parameter: bool = True
        """Multiply the learning rate by the root mean square of the weight, at least `eps_parameter` (section 8)."""
        relative_step: bool = False
        """Bound the learning rate by the inverse square root of the step: the paper's schedule with lr=0.01 and
        schedule.kind=constant."""
        decay_rate: PositiveFloat = 0.8
        """The decay of the second moments at step t is 1 - t^-decay_rate (section 7.2)."""
        clip_threshold: PositiveFloat = 1.0
        """Greatest root mean square of a weight's update, to which it is scaled down (section 6)."""
        eps: PositiveFloat = 1e-30
        """Added to squared gradients."""
        eps_parameter: NonNegativeFloat = 1e-3
        """Least root mean square of a weight that scales the learning rate."""
        beta1: FractionBelowOne = 0.0
        """Decay of the update's running mean; 0: no momentum, and no memory for it."""

    def __init__(self, config: Config, weights: list[LocalParameter]) -> None:
        super().__init__(config, weights)
        self.config: Adafactor.Config = config
        values = [weight.value for weight in weights]
        factored = [weight.decays and weight.value.dim() >= 2 for weight in weights]
        self.row, self.column, self.square = (
            [
                value.new_zeros(shape) if wanted == is_factored else None
                for value, is_factored, shape in zip(values, factored, shapes, strict=True)
            ]
            for wanted, shapes in (
                (True, [value.shape[:-1] for value in values]),
                (True, [(*value.shape[:-2], *value.shape[-1:]) for value in values]),
                (False, [value.shape for value in values]),
            )
        )
        self.mean = [torch.zeros_like(value) for value in values] if config.beta1 else None
        self.row_means: dict[int, Tensor] = {}
        """Mean over the row means of each factored weight: the mean of all its second moments."""
        self.steps = 0

    @torch.no_grad()
    def step(self, gradients: list[Tensor], lr: float) -> None:
        config = self.config
        self.steps += 1
        rate = min(lr, self.steps**-0.5) if config.relative_step else lr
        self._update_moments(gradients, 1 - self.steps**-config.decay_rate)
        squares = [
            _sum_of_squares(index, self._update(index, gradients[index])) for index in self._all
        ]
        if config.scale_parameter:
            squares += [
                _sum_of_squares(index, weight.value) for index, weight in enumerate(self.weights)
            ]
        means = self.full_tensors.means(squares)
        for index, weight in enumerate(self.weights):
            weight_rate: float | Tensor = rate * self.lr_factors[index]
            if self.weight_decays[index]:
                weight.value.mul_(1 - weight_rate * self.weight_decays[index])
            if config.scale_parameter:
                weight_rate = (
                    means[len(self.weights) + index].sqrt().clamp(min=config.eps_parameter)
                    * weight_rate
                )
            # Computed once more, so that the updates of all weights need no memory at once.
            update = self._update(index, gradients[index])
            update /= (means[index].sqrt() / config.clip_threshold).clamp(min=1.0)
            if self.mean is not None:
                update = self.mean[index].lerp_(update, 1 - config.beta1)
            weight.value.sub_(update * weight_rate)

    @property
    def _all(self) -> range:
        return range(len(self.weights))

    def _update_moments(self, gradients: list[Tensor], decay: float) -> None:
        """Move the second moments to the squared gradients."""
        sums: list[LocalSum] = []
        targets: list[Tensor] = []
        for index, gradient in enumerate(gradients):
            squared = gradient.square().add_(self.config.eps)
            row = self.row[index]
            column = self.column[index]
            square = self.square[index]
            if square is not None:
                square.lerp_(squared, 1 - decay)
            if row is not None and column is not None:
                last = gradient.dim() - 1
                sums += [
                    LocalSum(index, (last,), squared.sum(-1)),
                    LocalSum(index, (last - 1,), squared.sum(-2)),
                ]
                targets += [row, column]
        for moment, mean in zip(targets, self.full_tensors.means(sums), strict=True):
            moment.lerp_(mean, 1 - decay)
        rows = [index for index in self._all if self.row[index] is not None]
        row_sums = [
            LocalSum(index, (self.weights[index].value.dim() - 2,), self._row_sum(index))
            for index in rows
        ]
        self.row_means = dict(zip(rows, self.full_tensors.means(row_sums), strict=True))

    def _row_sum(self, index: int) -> Tensor:
        row = self.row[index]
        assert row is not None
        return row.sum(-1)

    def _update(self, index: int, gradient: Tensor) -> Tensor:
        """The gradient over the root of its second moments, of the weight's shape."""
        row = self.row[index]
        column = self.column[index]
        square = self.square[index]
        if row is None or column is None:
            assert square is not None
            return gradient * square.rsqrt()
        # Algorithm 4 with means for sums: the outer product of row and column means over the mean of all.
        scaled_row = (row / self.row_means[index].unsqueeze(-1)).rsqrt().unsqueeze(-1)
        return gradient * scaled_row * column.rsqrt().unsqueeze(-2)

    def states(self) -> dict[str, list[Tensor | None]]:
        states: dict[str, list[Tensor | None]] = {
            "row": self.row,
            "column": self.column,
            "square": self.square,
        }
        return states if self.mean is None else {**states, "mean": [*self.mean]}

    def reduced_dims(self) -> dict[str, int]:
        return {"row": -1, "column": -2}

    def counters(self) -> dict[str, int]:
        return {"step": self.steps}

    def set_counters(self, counters: dict[str, int]) -> None:
        self.steps = counters["step"]


def _sum_of_squares(weight: int, value: Tensor) -> LocalSum:
    return LocalSum(weight, tuple(range(value.dim())), value.square().sum())
