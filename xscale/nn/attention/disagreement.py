"""Li et al. 2018 (disagreement regularization): softmax attention with losses that pull the heads apart.

    L_subspace = 1/H^2 sum_ij cos(V^i, V^j)    the values of two heads at one token
    L_position = 1/H^2 sum_ij sum_s A^i_ts A^j_ts    their weights for one query
    L_output   = 1/H^2 sum_ij cos(O^i, O^j)    their outputs at one token

Each is the mean over tokens, and is added to the loss with its weight; in the paper they are negative, and maximised.
The sum over pairs of heads is the square of a sum over heads, so no pair is formed.
"""

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from xscale.core.config import NonNegativeFloat
from xscale.nn.attention.core import CORES, SCORES
from xscale.nn.attention.ops.dense import repeat_kv, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.softmax import Softmax
from xscale.nn.auxiliary import attach, mean_over_text
from xscale.nn.dims import Dims
from xscale.nn.roles import Role


@CORES.register(
    "disagreement",
    traits=replace(SCORES, context=(), exact=True),
    deviations=(
        "Each term is the mean over the tokens of a micro-batch; the paper does not say how it adds them up.",
    ),
)
class Disagreement(Softmax):
    reads_bias = True

    class Config(Softmax.Config):
        subspace_weight: NonNegativeFloat = 0.0
        """Weight of the loss on the cosines of the heads' values."""
        position_weight: NonNegativeFloat = 0.0
        """Weight of the loss on the products of the heads' attention weights, which computes all of them."""
        output_weight: NonNegativeFloat = 1.0
        """Weight of the loss on the cosines of the heads' outputs: the paper's best term by itself."""

    averages_tokens = True
    averages_text = True
    seams = {"sum_over_heads": Role.SUM_OVER_HEADS}

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config, self.heads = config, heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        o = super().forward(q, k, v, mask)
        if mask.aux_loss_weight is None:
            return o
        return attach(o, self.disagreement_loss(q, k, v, o, mask), mask.aux_loss_weight)

    def disagreement_loss(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, mask: AttentionMask
    ) -> Tensor:
        """Return the weighted sum of the terms of all heads, of all ranks."""
        config, loss = self.config, o.new_zeros((), dtype=upcast(o).dtype)
        if config.subspace_weight:
            values = F.normalize(upcast(repeat_kv(v, q.shape[1])), dim=-1)
            loss = loss + config.subspace_weight * self.similarity(values, mask.key_padding)
        if config.position_weight:
            loss = loss + config.position_weight * self.similarity(
                self.attention_weights(q, k, mask), mask.query_padding
            )
        if config.output_weight:
            loss = loss + config.output_weight * self.similarity(
                F.normalize(upcast(o), dim=-1), mask.query_padding
            )
        return loss

    def similarity(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Return the mean over tokens of 1/H^2 sum_ij x_i . x_j, of vectors of each head x [B, H, T, N].

        Tokens of `padding` [B, T] are left out.
        """
        similar = (self.sum_over_heads(x) / self.heads).square().sum(-1)
        return mean_over_text(similar, None if padding is None else ~padding)

    def sum_over_heads(self, x: Tensor) -> Tensor:
        """Sum x [B, H, T, N] over all heads: [B, T, N]. A seam: tensor parallelism adds up those of all ranks."""
        return x.sum(1)
