"""Normalisation layers by statistics of a batch, x -> x: `batch` and `power`.

They see all tokens of a micro-batch in training, over all data- and context-parallel ranks, so micro_batch_size is part
of what they compute. In evaluation they use running statistics, which move after each optimizer step by the means over
its micro-batches, and so are the same on every layout.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import Config, FractionBelowOne, NonNegativeInt, PositiveFloat
from xscale.core.errors import Problem
from xscale.core.requirements import kinds, must_divide, take
from xscale.nn.compiling.eager import eager
from xscale.nn.forward import Stats
from xscale.nn.init import ONES, ZEROS
from xscale.nn.norm.norm import NORMS, Norm, NormTraits
from xscale.nn.post_step import WeightWriter
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


def check_places(config: Any, path: str) -> list[Problem]:
    """List the norms with statistics of a batch in `config` at `path`, a model's, that are no norm of a sublayer."""
    problems = []
    for name in type(config).model_fields:
        value, at = getattr(config, name), f"{path}.{name}"
        members = {at: value} if isinstance(value, Config) else {}
        if isinstance(value, tuple):
            members = {
                f"{at}.{index}": member
                for index, member in enumerate(value)
                if isinstance(member, Config)
            }
        for member_path, member in members.items():
            if getattr(member, "family", None) == NORMS.name and not member_path.endswith(
                (".block.norm", ".pooling.norm")
            ):
                entry = NORMS.of(member)
                what = f"'{entry.name}' has statistics of the tokens between sublayers, and this norm stands elsewhere"
                choices = kinds(NORMS.able(batch_statistics=False), member_path)
                problems += [
                    Problem(member_path, what, choices=choices)
                ] * entry.traits.batch_statistics
            problems += check_places(member, member_path)
    return problems


class BatchStatisticsNorm(Norm):
    """A norm with a gain, a bias and running statistics; rows are tokens that are no padding, [N, D]."""

    seams = {"sum_over_batch": Role.SUM_OVER_BATCH}
    keeps_precision = True
    averages_tokens = True
    averages_text = True
    averages_packed_text = True
    weight: Parameter
    bias: Parameter

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.declare("weight", (width,), ("width",), ONES, decays=False)
        self.declare("bias", (width,), ("width",), ZEROS, decays=False)

    def declare_running(self, name: str, width: int, *, ones: bool) -> None:
        """Declare a running statistic [D]: initialised, sharded and saved as parameters are, without gradient."""
        self.declare(name, (width,), ("width",), ONES if ones else ZEROS, decays=False)
        self.get_parameter(name).requires_grad_(False)

    def sum_over_batch(self, x: Tensor) -> Tensor:
        """Sum of `x` over the ranks that have other tokens of the batch: `x`. A seam: data and context parallelism."""
        return x


def rows_of(x: Tensor, tokens: Tokens | None) -> Tensor:
    """Rows [N, D] of x [..., D] that are no padding."""
    real = None if tokens is None else tokens.real()
    return x.flatten(0, -2) if real is None else x[real]


@NORMS.register("batch", traits=NormTraits(per_token=False, centred=False, batch_statistics=True))
class BatchNorm(BatchStatisticsNorm):
    """Ioffe and Szegedy 2015: each channel minus its mean over the batch, divided by its deviation."""

    mean: Parameter
    variance: Parameter

    class Config(Norm.Config):
        eps: PositiveFloat = 1e-5
        """Added to the variance."""
        momentum: float = Field(default=0.1, gt=0, le=1)
        """Weight of a step's statistics in the running ones."""

    def __init__(self, config: Config, width: int) -> None:
        super().__init__(width, config.eps)
        self.momentum = config.momentum
        self.declare_running("mean", width, ones=False)
        self.declare_running("variance", width, ones=True)

    @classmethod
    def check(cls, config: Config, dims: Any, path: str) -> list[Problem]:
        if not dims.causal:
            return []
        what = "'batch' normalises by all tokens of the batch in training, later ones too, and this model is causal"
        choices = kinds([entry.name for entry in NORMS if entry.traits.per_token], path)
        return [Problem(path, what, "Or take an encoder.", choices=choices)]

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.training:
            mean, variance = self._of_batch(
                rows_of(precise, tokens), None if tokens is None else tokens.forward.stats
            )
        else:
            mean, variance = (
                self.use(running).to(precise.dtype) for running in (self.mean, self.variance)
            )
        y = (precise - mean) * torch.rsqrt(variance + self.eps)
        return (y * self.use(self.weight) + self.use(self.bias)).to(x.dtype)

    def _of_batch(self, rows: Tensor, stats: Stats | None) -> tuple[Tensor, Tensor]:
        """Mean and variance [D] over the rows of all ranks."""
        counted = self.sum_over_batch(torch.cat((rows.sum(0), rows.new_tensor([len(rows)]))))
        mean, count = counted[:-1] / counted[-1], counted[-1].detach()
        variance = self.sum_over_batch((rows - mean).square().sum(0)) / count
        if stats is not None:
            unbiased = variance * (count / (count - 1).clamp(min=1))
            stats.record(self, "running", torch.stack((mean, unbiased)))
        return mean, variance

    @torch.no_grad()
    def update_state(self, means: dict[str, Tensor], weights: WeightWriter) -> None:
        """Move the running mean and the running unbiased variance."""
        for running, value in zip(
            (self.mean, self.variance), means[f"{self.path}/running"], strict=True
        ):
            weights.update(
                running, lambda old, new: (1 - self.momentum) * old + self.momentum * new, value
            )


class _PowerScale(torch.autograd.Function):
    """y = x / psi with the backward of Shen et al. 2020, algorithm 2; psi and nu are [D].

    `scale`: what a token's own gradient is multiplied by in `gradient`. `record(gradient, y)` is called in backward.
    """

    @staticmethod
    def forward(
        context: Any, x: Tensor, psi: Tensor, nu: Tensor, scale: Tensor, record: Callable[..., None]
    ) -> Tensor:
        y = x / psi
        context.save_for_backward(y, psi, nu, scale)
        context.record = record
        return y

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        y, psi, nu, scale = context.saved_tensors
        context.record(gradient, y)
        return (gradient - scale * nu * y) / psi, None, None, None, None


@eager
def _power_scale(
    x: Tensor, psi: Tensor, nu: Tensor, scale: Tensor, record: Callable[..., None]
) -> Tensor:
    """`_PowerScale`; its backward records statistics, which no graph can."""
    y: Tensor = _PowerScale.apply(x, psi, nu, scale, record)  # type: ignore[no-untyped-call]
    return y


@NORMS.register(
    "power",
    traits=NormTraits(per_token=True, centred=False, exact_gradient=False, batch_statistics=True),
    deviations=(
        "The first steps too divide by the running quadratic mean, never by the batch's own, which holds later tokens; "
        "the authors' code takes the batch's own during a warm-up.",
    ),
)
class PowerNorm(BatchStatisticsNorm):
    """Shen et al. 2020: each channel divided by a running quadratic mean psi, with a running correction of gradients.

    psi of a step is that of the steps before, so no token reads another, and no rank waits for another. The correction
    nu y of the gradient (algorithm 2) stands for the derivative of psi; nu is in units of the gradient of one token.
    """

    square: Parameter
    correction: Parameter
    steps: Parameter

    class Config(Norm.Config):
        eps: PositiveFloat = 1e-5
        """Added to the quadratic mean."""
        alpha: FractionBelowOne = 0.9
        """Decay of the running quadratic mean and of the running correction."""
        warmup_steps: NonNegativeInt = 100
        """Steps at the start in which the running quadratic mean is the mean over all steps so far."""
        groups: NonNegativeInt = 1
        """Groups of channels; each token is first divided by its root mean square in each group, as in the authors'
        code, without which psi must follow the growth of the layers below. 0: not divided."""

    def __init__(self, config: Config, width: int) -> None:
        super().__init__(width, config.eps)
        self.alpha = config.alpha
        self.warmup_steps = config.warmup_steps
        self.groups = config.groups
        self.declare_running("square", width, ones=True)
        self.declare_running("correction", width, ones=False)
        self.declare_running("steps", width, ones=False)

    @classmethod
    def check(cls, config: Config, dims: Any, path: str) -> list[Problem]:
        if config.groups == 0:
            return []
        return must_divide(path, "groups", config.groups, "width", dims.width, *take(0))

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.groups:
            grouped = precise.view(*precise.shape[:-1], self.groups, -1)
            precise = F.rms_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(-2)
        square, nu = (
            self.use(running).to(precise.dtype) for running in (self.square, self.correction)
        )
        psi = (square + self.eps).sqrt()
        if self.training:
            count = precise[..., 0].numel() if tokens is None else tokens.count()
            weight = 1.0
            if tokens is not None and tokens.forward.aux_loss_weight is not None:
                weight = tokens.forward.aux_loss_weight * tokens.fraction()
            record = self._add_statistics(rows_of(precise.detach(), tokens), tokens, count, weight)
            real = None if tokens is None else tokens.real()
            # A token of padding has no loss, and so no correction.
            counts = precise.new_ones(()) if real is None else real[..., None].to(precise.dtype)
            scale = counts * (weight / count)
            y = _power_scale(precise, psi, nu, scale, record)
        else:
            y = precise / psi
        return (y * self.use(self.weight) + self.use(self.bias)).to(x.dtype)

    def _add_statistics(
        self, rows: Tensor, tokens: Tokens | None, count: float, weight: float
    ) -> Callable[[Tensor, Tensor], None]:
        """Collect the quadratic mean, and return what collects the gradient's part along y in backward."""
        stats = None if tokens is None else tokens.forward.stats
        if stats is None:
            return lambda gradient, y: None
        stats.record(self, "square", rows.square().sum(0, keepdim=True) / count)

        def record(gradient: Tensor, y: Tensor) -> None:
            # `gradient` of a token is weight / count of that of its own loss.
            stats.add(
                f"{self.path}/along", rows_of(gradient * y, tokens).sum(0, keepdim=True) / weight
            )

        return record

    @torch.no_grad()
    def update_state(self, means: dict[str, Tensor], weights: WeightWriter) -> None:
        """Move the running quadratic mean and the running correction (algorithms 1 and 2)."""
        (square,), (along,) = means[f"{self.path}/square"], means[f"{self.path}/along"]
        # nu <- nu (1 - (1 - alpha) Gamma) + (1 - alpha) Lambda, with Gamma the mean square of y = x / psi.
        before = self.square.detach()

        def corrected(correction: Tensor, step: Tensor, square: Tensor) -> Tensor:
            return correction + (1 - self.alpha) * (
                step - correction * (square / (before + self.eps))
            )

        weights.update(self.correction, corrected, along, square)
        weights.update(self.steps, lambda steps: steps + 1)
        weight = self._weight((self.steps.detach() <= self.warmup_steps).to(before.dtype))
        weights.update(self.square, lambda old, new: old + weight * (new - old), square)

    def _weight(self, warms_up: Tensor) -> Tensor:
        """Weight [D] of a step's quadratic mean: 1 / steps while it `warms_up` (1 or 0), then 1 - alpha."""
        weight: Tensor = warms_up / self.steps.detach() + (1 - warms_up) * (1 - self.alpha)
        return weight
