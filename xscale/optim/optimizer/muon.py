"""Jordan et al. 2024 (Muon): momentum orthogonalised by Newton-Schulz iterations for matrices; AdamW for the rest.

Matrices of linear maps are updated by Muon, those of experts [experts, outputs, inputs] each by itself. Embeddings, the
head, routers, gains and biases are updated by AdamW. The scale `match_rms_adamw` is that of Liu et al. 2025 (Muon is
scalable for LLM training), equation 4.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from xscale.core.config import FractionBelowOne, NonNegativeFloat, PositiveFloat
from xscale.optim.full_tensors import MatrixPart
from xscale.optim.optimizer.adamw import AdamW
from xscale.optim.optimizer.optimizer import OPTIMIZERS, LocalParameter, Optimizer, OptimizerTraits

NEWTON_SCHULZ_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
MATCHED_RMS = 0.2
"""Root mean square of AdamW's usual updates (Liu et al. 2025, section 2.2)."""


@OPTIMIZERS.register(
    "muon",
    traits=OptimizerTraits(states_per_parameter=1, elementwise=False),
    deviations=(
        "The momentum is a running mean, as in torch.optim.Muon, not a sum; orthogonalised they are the same.",
    ),
)
class Muon(Optimizer):
    class Config(Optimizer.Config):
        lr: PositiveFloat = 1e-3
        """Peak learning rate of matrices; the schedule scales it."""
        adamw_lr: NonNegativeFloat | None = None
        """Peak learning rate of what AdamW updates, scaled by the same schedule; null: `lr`."""
        momentum: FractionBelowOne = 0.95
        """Decay of the gradient's running mean."""
        nesterov: bool = True
        """Nesterov momentum."""
        ns_steps: int = Field(default=5, ge=1, lt=100)
        """Newton-Schulz iterations."""
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
        """Coefficients a, b, c of an iteration X -> aX + b(XX^T)X + c(XX^T)^2 X."""
        ns_dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
        """Number format of the iterations, and of the messages that gather a sharded matrix."""
        ns_eps: PositiveFloat = 1e-7
        """Least Frobenius norm by which a matrix is divided before the iterations."""
        adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
        """Factor on the learning rate of a matrix [A, B]. original: sqrt(max(1, A/B)), for rates about 0.02;
        match_rms_adamw: 0.2 sqrt(max(A, B)), so that AdamW's rates and weight decays can be kept."""
        beta1: FractionBelowOne = 0.9
        """AdamW's decay of the gradient's running mean."""
        beta2: FractionBelowOne = 0.95
        """AdamW's decay of the squared gradient's running mean."""
        eps: NonNegativeFloat = 1e-8
        """Added by AdamW to the root of the second moment."""

    def __init__(self, config: Config, weights: list[LocalParameter]) -> None:
        super().__init__(config, weights)
        self.config: Muon.Config = config
        self.matrices = [index for index, weight in enumerate(weights) if weight.linear_map]
        self.others = [index for index, weight in enumerate(weights) if not weight.linear_map]
        self.momentum = {index: torch.zeros_like(weights[index].value) for index in self.matrices}
        adamw_config = AdamW.Config(
            lr=config.lr if config.adamw_lr is None else config.adamw_lr,
            weight_decay=config.weight_decay,
            groups=config.groups,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
        )
        self.adamw = AdamW(adamw_config, [weights[index] for index in self.others])

    @classmethod
    def example(cls) -> Config:
        """A config for the conformance suite: in double precision, and with rates for matrices of a dozen rows."""
        return cls.Config(ns_dtype="float64", adjust_lr_fn="original")

    @classmethod
    def mup_exponent(cls, config: Any, *, linear_map: bool) -> float | None:
        """The spectral norm of an update is to be the same at all widths (Yang, Simon and Bernstein 2023).

        That of `original` is, and that of `match_rms_adamw` grows with the square root of the width.
        """
        if not linear_map:
            return AdamW.mup_exponent(config, linear_map=False)
        return 0.0 if config.adjust_lr_fn == "original" else 0.5

    @classmethod
    def describe(cls, config: Config, weights: list[LocalParameter]) -> list[str]:
        sizes = [(weight.linear_map, weight.value.numel()) for weight in weights]
        muon, adamw = (
            [size for is_matrix, size in sizes if is_matrix == wanted] for wanted in (True, False)
        )
        line = (
            f"optimizer muon: {len(muon)} tensors of matrices, {sum(muon):,} parameters; "
            f"adamw: {len(adamw)} tensors, {sum(adamw):,} parameters"
        )
        return [line, *super().describe(config, weights)]

    def set_progress(self, progress: float) -> None:
        super().set_progress(progress)
        self.adamw.set_progress(progress)

    @torch.no_grad()
    def step(self, gradients: list[Tensor], lr: float) -> None:
        config = self.config
        self.adamw.kernel_choices = self.kernel_choices
        adamw_lr = lr if config.adamw_lr is None else lr * (config.adamw_lr / config.lr)
        self.adamw.step([gradients[index] for index in self.others], adamw_lr)
        for index in self.matrices:
            self.momentum[index].lerp_(gradients[index], 1 - config.momentum)
            weight_decay = self.weight_decays[index]
            if weight_decay:
                self.weights[index].value.mul_(1 - lr * self.lr_factors[index] * weight_decay)

        def update(part: MatrixPart) -> Tensor:
            gradient, momentum = (
                part.of(gradients[part.weight]),
                part.of(self.momentum[part.weight]),
            )
            direction = gradient.lerp(momentum, config.momentum) if config.nesterov else momentum
            return direction.to(NEWTON_SCHULZ_DTYPES[config.ns_dtype])

        orthogonal = NewtonSchulz(config.ns_steps, config.ns_coefficients, config.ns_eps)
        for part, direction in self.full_tensors.map_matrices(self.matrices, update, orthogonal):
            value = part.of(self.weights[part.weight].value)
            adjustment = lr_adjustment(
                config.adjust_lr_fn, *self.full_tensors.shape(part.weight)[-2:]
            )
            value.add_(
                direction.to(value.dtype), alpha=-lr * self.lr_factors[part.weight] * adjustment
            )

    def states(self) -> dict[str, list[Tensor | None]]:
        states: dict[str, list[Tensor | None]] = {
            "momentum": [self.momentum.get(index) for index in range(len(self.weights))]
        }
        for name, values in self.adamw.states().items():
            by_index = dict(zip(self.others, values, strict=True))
            states[name] = [by_index.get(index) for index in range(len(self.weights))]
        return states

    def counters(self) -> dict[str, int]:
        return self.adamw.counters()

    def set_counters(self, counters: dict[str, int]) -> None:
        self.adamw.set_counters(counters)


def lr_adjustment(adjust_lr_fn: str, outputs: int, inputs: int) -> float:
    """Return the factor on the learning rate of a matrix [outputs, inputs]."""
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, outputs / inputs))
    return MATCHED_RMS * math.sqrt(max(outputs, inputs))


@dataclass(frozen=True)
class NewtonSchulz:
    """Approximates U V^T of matrices U S V^T."""

    steps: int
    coefficients: Sequence[float]
    eps: float

    def __call__(self, matrices: Tensor) -> Tensor:
        """[outputs, inputs] or [experts, outputs, inputs], each by itself; singular values end in about 0.7 to 1.2."""
        outputs, inputs = matrices.shape[-2:]
        x = matrices.reshape(-1, outputs, inputs)
        if outputs > inputs:
            x = x.mT
        # The Frobenius norm bounds the greatest singular value, and the iterations need it to be at most 1.
        x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=self.eps)
        a, b, c = self.coefficients
        for _ in range(self.steps):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        if outputs > inputs:
            x = x.mT
        return x.reshape(matrices.shape)
