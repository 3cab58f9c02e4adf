"""Choromanski et al. 2021 (Performer): random features whose products estimate the softmax kernel, FAVOR+.

With x scaled by K^(-1/4) and directions w: positive features exp(w . x - |x|^2 / 2); trigonometric features, the
paper's first version, exp(|x|^2 / 2) [sin(w . x), cos(w . x)]; and relu(w . x), the arc-cosine kernel of order one.
"""

from typing import Literal

import torch
from torch import Tensor

from xscale.core.config import NonNegativeInt, PositiveFloat, PositiveInt
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.chunked_scan import (
    linear_attention,
    scan_multiply_adds,
    trigonometric_attention,
)
from xscale.nn.attention.ops.dense import upcast
from xscale.nn.attention.ops.log_features import log_feature_attention
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.ops.random_features import RandomProjection
from xscale.nn.dims import Dims


@CORES.register(
    "performer",
    traits=CoreTraits(
        causal=True,
        bidirectional=True,
        cross=True,
        per_head=True,
        cost="(T + S) * (features * K + (2 if estimator == 'trigonometric' else 1) * features * (K + 1))",
        context=("ulysses", "scan"),
        documents=True,
        decode=True,
    ),
    deviations=(
        "Training draws new directions at every call or never (`redraw`); the paper draws them every so many steps.",
        "Positive features of keys are relative to the maximum so far in causal models, and `eps` is added to those of "
        "queries alone: the paper's maximum over all keys would let a causal model see later ones.",
        "The divisor of the trigonometric estimator is at least the share of one feature, in a fifth to a half of the "
        "rows at unit variance; in the paper it may be near zero or negative.",
        "ReLU features have 1e-3 added before they are divided by sqrt(m); the authors add it to the divided ones.",
    ),
)
class Performer(Core):
    class Config(Core.Config):
        features: PositiveInt = 256
        """m, random directions; the paper takes about K log K."""
        estimator: Literal["positive", "trigonometric", "relu"] = "positive"
        """positive: FAVOR+; trigonometric: FAVOR, whose weights may be negative; relu: no softmax, but often better."""
        redraw: bool = False
        """Whether training draws new directions at every call; evaluation has fixed ones."""
        eps: PositiveFloat = 1e-6
        """Added to the positive features of queries, whose largest is 1, so that no divisor is 0."""
        seed: NonNegativeInt = 0
        """Seed of the directions."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config
        self.projection = RandomProjection(
            config.features, head_width, config.seed + dims.layer, config.redraw
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        q, k = upcast(q), upcast(k)
        directions = self.projection(q, self.random if self.training else None)
        floor = float(torch.finfo(q.dtype).tiny)
        kernel = self.kernel_choices.get("linear_attention")
        if self.config.estimator == "trigonometric":
            weights = (k.square().sum(-1, keepdim=True) / (2 * k.shape[-1] ** 0.5)).exp()
            # The squares of a sine and a cosine sum to 1.
            fq, fk = (
                self._map(x, directions, query) / directions.shape[0] ** 0.5
                for x, query in ((q, True), (k, False))
            )
            return trigonometric_attention(fq, fk, v, mask, weights, kernel=kernel)
        q, k = self._map(q, directions, True), self._map(k, directions, False)
        if self.config.estimator == "positive":
            return log_feature_attention(q, k, v, mask, kernel=kernel)
        return linear_attention(q, k, v, mask, floor, kernel=kernel)

    def _map(self, x: Tensor, directions: Tensor, query: bool) -> Tensor:
        """Features [B, H, T, F] of x [B, H, T, K]; the logarithms of positive features of keys."""
        x = x * x.shape[-1] ** -0.25
        along = x @ directions.mT  # [B, H, T, F]
        # In place from here on: a feature map is several times as wide as a head.
        kind = self.config.estimator
        if kind == "relu":
            return along.relu_() + 1e-3
        half = x.square().sum(-1, keepdim=True) / 2
        if kind == "trigonometric":
            # A factor that depends only on the query cancels with the divisor, so the query's is omitted.
            pair = torch.cat((along.sin(), along.cos()), -1)
            return pair if query else pair * half.exp()
        if not query:
            return along.sub_(half)
        return (along - along.amax(-1, keepdim=True)).exp() + self.config.eps

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        directions = self.config.features
        features = directions * (2 if self.config.estimator == "trigonometric" else 1)
        projected = (queries + keys) * directions * head_width
        return heads * (
            projected + scan_multiply_adds(queries, keys, features, head_width, self.causal)
        )
