"""Loshchilov and Hutter 2019: Adam with decoupled weight decay, by torch's fused implementation where there is one."""

import torch
from torch import Tensor

from xscale.optim.optimizer import OPTIMIZERS, Optimizer, OptimizerTraits, Weight, zeros


@OPTIMIZERS.register("adamw", traits=OptimizerTraits(states_per_parameter=2, elementwise=True))
class AdamW(Optimizer):
    class Config(Optimizer.Config):
        beta1: float = 0.9
        """Decay of the gradient's running mean."""
        beta2: float = 0.95
        """Decay of the squared gradient's running mean."""
        eps: float = 1e-8
        """Added to the root of the second moment."""

    def __init__(self, config: Config, weights: list[Weight]) -> None:
        super().__init__(config, weights)
        groups = [
            {"params": [w.value for w in weights if w.decays], "weight_decay": config.weight_decay},
            {"params": [w.value for w in weights if not w.decays], "weight_decay": 0.0},
        ]
        self.torch = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self.mean, self.square = zeros(weights), zeros(weights)
        self.steps = [torch.zeros((), dtype=torch.float32, device=weight.value.device) for weight in weights]
        for weight, mean, square, count in zip(weights, self.mean, self.square, self.steps, strict=True):
            self.torch.state[weight.value] = {"step": count, "exp_avg": mean, "exp_avg_sq": square}

    def step(self, gradients: list[Tensor], lr: float) -> None:
        for group in self.torch.param_groups:
            group["lr"] = lr
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.value.grad = gradient
        self.torch.step()
        for weight in self.weights:
            weight.value.grad = None

    def states(self) -> dict[str, list[Tensor]]:
        return {"mean": self.mean, "square": self.square}

    def counters(self) -> dict[str, int]:
        return {"step": int(self.steps[0].item()) if self.steps else 0}

    def set_counters(self, counters: dict[str, int]) -> None:
        for count in self.steps:
            count.fill_(counters["step"])
