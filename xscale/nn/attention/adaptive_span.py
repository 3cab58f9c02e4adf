"""Sukhbaatar et al. 2019 (adaptive attention span), section 2.1: each head learns how far it looks, its span z.

    a_ij = m_z(i - j) exp(s_ij) / sum_q m_z(i - q) exp(s_iq),  m_z(x) = min(max((R + z - x) / R, 0), 1)

The mask fades over the R tokens behind the span. The loss (lambda / H) sum_h z_h keeps spans short. The mask is a
factor of the softmax's terms, so its logarithm is a bias on the scores.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import Config, NonNegativeFloat, PositiveFloat, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import at_most
from xscale.nn.attention.core import CORES, SCORES
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.softmax import Softmax
from xscale.nn.auxiliary import attach
from xscale.nn.dims import Dims
from xscale.nn.init import Init


class SpanConfig(Config):
    """Settings of spans that are learned by head, or predicted by token."""

    max_span: PositiveInt | None = None
    """S, the longest span, in tokens; null: the data's sequence length."""
    ramp: PositiveFloat = 32.0
    """R, tokens behind the span over which the mask falls to 0."""
    span_loss_weight: NonNegativeFloat = 1e-6
    """Lambda, weight of the loss on the mean span of the heads, in nats a token."""


@CORES.register(
    "adaptive_span",
    traits=replace(SCORES, cross=False),
    deviations=(
        "All scores are computed, also those that the mask hides; the authors' code trims keys to the longest span.",
        "Spans are clamped to [0, S] where they are used, and gradients that lead out of it dropped; the authors' code "
        "clamps the parameters after each step.",
        "A bidirectional model has spans to both sides; the paper's models are causal.",
    ),
)
class AdaptiveSpan(Softmax):
    reads_bias = True
    # In bfloat16 a span of a thousand tokens changes by no fewer than four.
    keeps_precision = True
    span: Parameter

    class Config(SpanConfig, Softmax.Config):
        initial_span: NonNegativeFloat = 0.0
        """Span of all heads before training, in tokens."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.max_span = config.max_span or dims.length
        self.ramp, self.loss_weight = config.ramp, config.span_loss_weight
        # A fraction of S, so that an optimizer's step is as large as those of other parameters.
        start = Init("constant", value=config.initial_span / self.max_span)
        self.declare("span", (heads,), ("heads",), start, decays=False)

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        longest = config.max_span or dims.length
        if config.initial_span > longest:
            what = f"initial_span={config.initial_span} is longer than max_span={longest}"
            problems.append(at_most(f"{path}.initial_span", what, longest))
        return problems

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        spans = self.max_span * clamp_inward(self.use(self.span))  # [H]
        bias = log_soft_mask(spans[:, None, None], mask, self.ramp)[None]  # [1, H, T, S]
        bias = bias if mask.bias is None else bias + mask.bias
        o = super().forward(q, k, v, replace(mask, bias=bias))
        # Ranks that share the heads have equally many, so that the mean of their means is that of all heads.
        return attach(o, self.loss_weight * spans.mean(), mask.aux_loss_weight)


def log_soft_mask(spans: Tensor, mask: AttentionMask, ramp: float) -> Tensor:
    """Return log m_z of the distance of each query and key, of spans z [..., T or 1, 1] -> [..., T, S].

    Where m_z is 0 it is minus infinity.
    """
    queries = torch.arange(mask.queries, device=spans.device)[:, None] + mask.offset
    distances = (queries - torch.arange(mask.keys, device=spans.device)).abs()  # [T, S]
    # The difference of whole numbers comes first: beside it a short span would be rounded away where they are equal.
    soft_mask = ((ramp - distances + spans) / ramp).clamp(0, 1)
    hidden = soft_mask <= 0
    return soft_mask.masked_fill(hidden, 1.0).log().masked_fill(hidden, float("-inf"))


class _ClampInward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x.clamp(0, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        # A step follows the negative gradient.
        outward = ((x <= 0) & (gradient > 0)) | ((x >= 1) & (gradient < 0))
        return gradient.masked_fill(outward, 0.0)


def clamp_inward(x: Tensor) -> Tensor:
    """Clamp to [0, 1]; the gradient passes at the ends too, unless a step along it would leave the interval."""
    clamped: Tensor = _ClampInward.apply(x)  # type: ignore[no-untyped-call]
    return clamped
