"""Sukhbaatar et al. 2019 (adaptive attention span), section 2.2: each token predicts how far its heads look.

    z_t = S sigmoid(v^T x_t + b)

The soft mask of the distance and the loss on the spans are those of the core `adaptive_span`.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.nn.attention.adaptive_span import SpanConfig, log_soft_mask
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.auxiliary import attach, mean_over_text
from xscale.nn.dims import Dims
from xscale.nn.init import ZEROS
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import CAUSAL_OR_BIDIRECTIONAL, MIXERS
from xscale.nn.tokens import Tokens


@MIXERS.register(
    "dynamic_span",
    traits=replace(CAUSAL_OR_BIDIRECTIONAL, prefix=True),
    deviations=(
        "All scores are computed, also those that the mask hides.",
        "A bidirectional model has spans to both sides; the paper's models are causal.",
    ),
)
class DynamicSpan(Attention):
    # In bfloat16 a span of a thousand tokens changes by no fewer than four.
    keeps_precision = True
    span_weight: Parameter
    span_bias: Parameter

    class Config(SpanConfig, Attention.Config):
        pass

    cores = ("softmax",)
    shards_sequence = False
    averages_tokens = True
    averages_text = True
    averages_packed_text = True

    reads_bias = True

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        self.max_span = config.max_span or dims.length
        self.ramp, self.loss_weight = config.ramp, config.span_loss_weight
        self.declare("span_weight", (config.heads, dims.width), ("heads", "width"), dims.init)
        self.declare("span_bias", (config.heads,), ("heads",), ZEROS, decays=False)

    def attend_input(
        self, x: Tensor, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> Tensor:
        weight, bias = self.use(self.span_weight), self.use(self.span_bias)
        predicted = torch.sigmoid(F.linear(x.to(weight.dtype), weight, bias))
        spans = self.max_span * predicted.transpose(1, 2)  # [B, H, T]
        score_bias = log_soft_mask(spans[..., None], mask, self.ramp)  # [B, H, T, S]
        score_bias = score_bias if mask.bias is None else score_bias + mask.bias
        o = self.attend(q, k, v, replace(mask, bias=score_bias))
        # Ranks that share the heads have equally many, so that the mean of their means is that of all heads.
        return attach(
            o,
            self.loss_weight * mean_over_text(spans, tokens.real()),
            tokens.forward.aux_loss_weight,
        )
