"""Loshchilov and Hutter 2019: Adam with decoupled weight decay, fused over all tensors where a kernel can."""

from torch import Tensor

from xscale.core.config import FractionBelowOne, NonNegativeFloat
from xscale.optim.optimizer.optimizer import (
    OPTIMIZERS,
    LocalParameter,
    Optimizer,
    OptimizerTraits,
    zeros_like_values,
)
from xscale_kernels.adamw.op import adamw_step_


@OPTIMIZERS.register("adamw", traits=OptimizerTraits(states_per_parameter=2, elementwise=True))
class AdamW(Optimizer):
    class Config(Optimizer.Config):
        beta1: FractionBelowOne = 0.9
        """Decay of the gradient's running mean."""
        beta2: FractionBelowOne = 0.95
        """Decay of the squared gradient's running mean."""
        eps: NonNegativeFloat = 1e-8
        """Added to the root of the second moment."""

    def __init__(self, config: Config, weights: list[LocalParameter]) -> None:
        super().__init__(config, weights)
        self.config: AdamW.Config = config
        self.mean, self.square = zeros_like_values(weights), zeros_like_values(weights)
        self.steps = 0
        self.members: dict[tuple[float, float], list[int]] = {}
        """(Multiplier of the learning rate, weight decay) -> indices of the weights that are updated together."""
        self.regroup()

    @classmethod
    def mup_exponent(cls, config: Config, *, linear_map: bool) -> float | None:
        return 1.0

    def regroup(self) -> None:
        self.members = {}
        for index, settings in enumerate(zip(self.lr_factors, self.weight_decays, strict=True)):
            self.members.setdefault(settings, []).append(index)

    def step(self, gradients: list[Tensor], lr: float) -> None:
        self._step(gradients, lr, None)

    def scaled_step(self, gradients: list[Tensor], lr: float, scale: float) -> None:
        self._step(gradients, lr, scale)

    def _step(self, gradients: list[Tensor], lr: float, scale: float | None) -> None:
        config = self.config
        self.steps += 1
        for (lr_factor, weight_decay), group in self.members.items():
            params = [self.weights[index].value for index in group]
            adamw_step_(
                params,
                *(
                    [tensors[index] for index in group]
                    for tensors in (gradients, self.mean, self.square)
                ),
                step=self.steps,
                lr=lr * lr_factor,
                betas=(config.beta1, config.beta2),
                eps=config.eps,
                weight_decay=weight_decay,
                scale=None if scale is None else params[0].new_full((), scale),
                implementation=self.kernel_choices.get("adamw"),
            )

    def states(self) -> dict[str, list[Tensor]]:
        return {"mean": self.mean, "square": self.square}

    def counters(self) -> dict[str, int]:
        return {"step": self.steps}

    def set_counters(self, counters: dict[str, int]) -> None:
        self.steps = counters["step"]
