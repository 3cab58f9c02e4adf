"""Shazeer et al. 2020: talking-heads attention, linear maps over the heads before and after the softmax.

    J_h = q_h k_h^T / sqrt(K),  L = P_l J,  W = softmax(L),  U = P_w W,  o_h = U_h v_h

P_l and P_w mix the heads of each pair of query and key. A bias of the position is added to L, as the authors' code has
it. With identity matrices it is softmax attention.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Parameter

from xscale.nn.attention.core import CORES, SCORES, Core
from xscale.nn.attention.ops.dense import grouped_matmul, masked_softmax, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.init import Init


@CORES.register(
    "talking_heads",
    traits=replace(SCORES, context=(), normalised=False, per_head=False, cost="2*T*S*(K + H)"),
    deviations=("Queries, softmax and values have one number of heads; the paper allows three.",),
)
class TalkingHeads(Core):
    logits: Parameter
    weights: Parameter

    def __init__(self, config: Core.Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        # Keeps the variance, as the authors' code does.
        start = Init(std=heads**-0.5)
        self.declare("logits", (heads, heads), ("state", "state"), start)
        self.declare("weights", (heads, heads), ("state", "state"), start)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        products = upcast(grouped_matmul(q, k.mT)) * q.shape[-1] ** -0.5  # [B, H, T, S]
        scores = mix_heads(products, self.use(self.logits))
        bias = mask.score_bias(q, k)
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        hidden = None if mask.allowed is None else ~mask.allowed.to(q.device)
        weights = mix_heads(masked_softmax(scores, hidden), self.use(self.weights))
        return self.mix_values(weights, v, mask)

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        return 2.0 * heads * queries * keys * (head_width + heads)


def mix_heads(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply x [B, H, T, S] by a matrix [output heads, H] over the heads."""
    return torch.einsum("bhts,gh->bgts", x, matrix.to(x.dtype))
