"""Defazio et al. 2024 (The Road Less Scheduled), algorithm 1: AdamW without a schedule, evaluated at an average.

    y_t     = (1 - beta1) z_t + beta1 x_t                    gradients g_t are those at y_t
    v_t     = beta2 v_{t-1} + (1 - beta2) g_t^2
    z_{t+1} = z_t - gamma_t (g_t / (sqrt(v_t / (1 - beta2^t)) + eps) + lambda y_t)
    x_{t+1} = (1 - c_{t+1}) x_t + c_{t+1} z_{t+1}            c_{t+1} = gamma_t^2 / sum_{i <= t} gamma_i^2

The model holds y while it trains; x is evaluated and saved. gamma_t is the learning rate with its warm-up.
"""

import struct

import torch
from pydantic import Field
from torch import Tensor

from xscale.core.config import FractionBelowOne, NonNegativeFloat
from xscale.optim.optimizer.optimizer import (
    OPTIMIZERS,
    LocalParameter,
    Optimizer,
    OptimizerTraits,
    zeros_like_values,
)


@OPTIMIZERS.register(
    "schedule_free_adamw",
    traits=OptimizerTraits(states_per_parameter=3, elementwise=True),
    deviations=(
        "The second moment is divided by 1 - beta2^t, as in the authors' code; algorithm 1 multiplies the learning "
        "rate by the root of that, and so the weights of the average too.",
        "The weights of the average are of the highest learning rate so far, as in the authors' code: it differs where "
        "a resumed run has a lower one.",
    ),
)
class ScheduleFreeAdamW(Optimizer):
    class Config(Optimizer.Config):
        beta1: float = Field(default=0.9, gt=0, lt=1)
        """Weight of the average x in the weights y at which gradients are computed."""
        beta2: FractionBelowOne = 0.999
        """Decay of the squared gradient's running mean."""
        eps: NonNegativeFloat = 1e-8
        """Added to the root of the second moment."""

    averaged_state = "x"

    def __init__(self, config: Config, weights: list[LocalParameter]) -> None:
        super().__init__(config, weights)
        self.config: ScheduleFreeAdamW.Config = config
        self.x = [weight.value.clone() for weight in weights]
        self.z = [weight.value.clone() for weight in weights]
        self.square = zeros_like_values(weights)
        self.steps = 0
        self.highest_lr, self.weight_sum = 0.0, 0.0

    @classmethod
    def mup_exponent(cls, config: Config, *, linear_map: bool) -> float | None:
        return 1.0

    @torch.no_grad()
    def adopt_weights(self) -> None:
        for weight, x, z in zip(self.weights, self.x, self.z, strict=True):
            x.copy_(weight.value)
            z.copy_(weight.value)

    @torch.no_grad()
    def restore_weights(self) -> None:
        for weight, x, z in zip(self.weights, self.x, self.z, strict=True):
            torch.lerp(z, x, self.config.beta1, out=weight.value)

    @torch.no_grad()
    def step(self, gradients: list[Tensor], lr: float) -> None:
        beta2, eps = self.config.beta2, self.config.eps
        self.steps += 1
        self.highest_lr = max(self.highest_lr, lr)
        self.weight_sum += self.highest_lr**2
        average_weight = self.highest_lr**2 / self.weight_sum if self.weight_sum else 0.0
        correction = 1 - beta2**self.steps
        settings = zip(self.lr_factors, self.weight_decays, strict=True)
        tensors = zip(self.weights, gradients, self.x, self.z, self.square, strict=True)
        for (weight, gradient, x, z, square), (lr_factor, weight_decay) in zip(
            tensors, settings, strict=True
        ):
            weight_lr = lr * lr_factor
            if weight_decay:
                z.sub_(weight.value, alpha=weight_lr * weight_decay)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            z.addcdiv_(gradient, square.div(correction).sqrt_().add_(eps), value=-weight_lr)
            x.lerp_(z, average_weight)
        self.restore_weights()

    def states(self) -> dict[str, list[Tensor]]:
        return {"x": self.x, "z": self.z, "square": self.square}

    def counters(self) -> dict[str, int]:
        return {
            "step": self.steps,
            "highest_lr_bits": bits_of(self.highest_lr),
            "weight_sum_bits": bits_of(self.weight_sum),
        }

    def set_counters(self, counters: dict[str, int]) -> None:
        self.steps = counters["step"]
        self.highest_lr = float_of(counters["highest_lr_bits"])
        self.weight_sum = float_of(counters["weight_sum_bits"])


def bits_of(value: float) -> int:
    """Return the bits of a double that is not negative, as a count: a checkpoint's counters are counts."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def float_of(bits: int) -> float:
    """Return the double of those bits."""
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value
