"""Fan et al. 2021 (mask attention networks): dynamic mask attention, whose weights a learned mask multiplies.

    M_h[t, s] = sigmoid(x_t W + P_{t-s} + U_h),  A_h[t, s] = M_h[t, s] exp(q_t k_s / sqrt(K)) / (the sum over s)

The mask depends on the token, on the relative distance with its direction, and on the head. In the paper such a layer
stands before self-attention and the feed-forward network in each block: two sublayers `mixer`, of which the first is
this one. The mask is a factor of the softmax's terms, so its logarithm is a bias on the scores.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.init import ZEROS
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import CAUSAL_OR_BIDIRECTIONAL, MIXERS
from xscale.nn.tokens import Tokens


@MIXERS.register(
    "dynamic_mask",
    traits=replace(CAUSAL_OR_BIDIRECTIONAL, prefix=True),
    deviations=(
        "Distances beyond the data's sequence length have the mask of the longest.",
        "There is no ReLU before the output projection, which the authors' code has and the paper does not.",
    ),
)
class DynamicMask(Attention):
    token_weight: Parameter
    distance_table: Parameter
    head_bias: Parameter

    cores = ("softmax",)
    shards_sequence = False

    reads_bias = True

    def __init__(self, config: Attention.Config, dims: Dims) -> None:
        super().__init__(config, dims)
        self.length = dims.length
        self.declare("token_weight", (dims.width,), ("width",), dims.init)
        self.declare("distance_table", (2, dims.length), ("state", "tokens"), ZEROS, decays=False)
        self.declare("head_bias", (config.heads,), ("heads",), ZEROS, decays=False)

    def attend_input(
        self, x: Tensor, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> Tensor:
        of_token = (x @ self.use(self.token_weight))[:, None, :, None]  # [B, 1, T, 1]
        of_head = self.use(self.head_bias)[:, None, None]  # [H, 1, 1]
        bias = F.logsigmoid(of_token + self.of_distance(mask) + of_head)  # [B, H, T, S]
        return self.attend(
            q, k, v, replace(mask, bias=bias if mask.bias is None else bias + mask.bias)
        )

    def of_distance(self, mask: AttentionMask) -> Tensor:
        """Return P_{t-s} of queries and keys, [T, S]; that of a token and itself is 0."""
        table = self.use(self.distance_table)  # keys before the query, keys after it
        queries = torch.arange(mask.queries, device=table.device)[:, None] + mask.offset
        distances = queries - torch.arange(mask.keys, device=table.device)  # [T, S]
        by_distance = torch.cat((table[1].flip(0), table.new_zeros(1), table[0]))  # of -N to N
        return by_distance[distances.clamp(-self.length, self.length) + self.length]
