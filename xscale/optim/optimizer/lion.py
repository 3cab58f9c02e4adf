"""Chen et al. 2023, algorithm 2 (Lion): the sign of an interpolated momentum, with decoupled weight decay."""

import torch
from torch import Tensor

from xscale.core.config import Fraction
from xscale.optim.optimizer.optimizer import (
    OPTIMIZERS,
    LocalParameter,
    Optimizer,
    OptimizerTraits,
    zeros_like_values,
)


@OPTIMIZERS.register("lion", traits=OptimizerTraits(states_per_parameter=1, elementwise=True))
class Lion(Optimizer):
    class Config(Optimizer.Config):
        beta1: Fraction = 0.9
        """Weight of the momentum in the step's direction."""
        beta2: Fraction = 0.99
        """Decay of the momentum."""

    def __init__(self, config: Config, weights: list[LocalParameter]) -> None:
        super().__init__(config, weights)
        self.config: Lion.Config = config
        self.momentum = zeros_like_values(weights)

    @classmethod
    def mup_exponent(cls, config: Config, *, linear_map: bool) -> float | None:
        return 1.0

    @torch.no_grad()
    def step(self, gradients: list[Tensor], lr: float) -> None:
        config = self.config
        settings = zip(self.lr_factors, self.weight_decays, strict=True)
        tensors = zip(self.weights, gradients, self.momentum, strict=True)
        for (weight, gradient, momentum), (lr_factor, weight_decay) in zip(
            tensors, settings, strict=True
        ):
            direction = torch.lerp(gradient, momentum, config.beta1).sign_()
            weight_lr = lr * lr_factor
            if weight_decay:
                weight.value.mul_(1 - weight_lr * weight_decay)
            weight.value.add_(direction, alpha=-weight_lr)
            momentum.lerp_(gradient, 1 - config.beta2)

    def states(self) -> dict[str, list[Tensor]]:
        return {"momentum": self.momentum}
