"""Scores of the previous layer as a prior of attention (Lin et al. 2022, equation 22), such as RealFormer's.

    S_l = w_1 Q K^T / sqrt(K) + w_2 S_{l-1},  o = softmax(S_l) V,  S_0 = w_1 Q K^T / sqrt(K)

S [B, H, T, S] are the scores of each head before mask and softmax, with what the position adds to them; S_l is handed
to the next block. With w_1 = w_2 = 1 this is residual attention (He et al. 2021, RealFormer), with w_2 = 0 the first
layer of a lazy block (Ying et al. 2021, LazyFormer), whose other layers have the mixer `reused_attention`.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from xscale.nn.attention.core import CORES, SCORES, Core
from xscale.nn.attention.ops.dense import grouped_matmul, masked_softmax, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.init import Init


class ScoreCore(Core):
    """Base class of cores that hand on their scores: softmax attention over what `combine` makes of them."""

    @classmethod
    def reads_scores(cls, config: Any) -> bool:
        return True

    def combine(self, scores: Tensor, previous: Tensor | None, mask: AttentionMask) -> Tensor:
        """Return S_l [B, H, T, S] of this layer's scaled products and of S_{l-1}, None in the first layer."""
        raise NotImplementedError

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        scores = upcast(grouped_matmul(q, k.mT)) * q.shape[-1] ** -0.5  # [B, H, T, S]
        bias, edge = mask.score_bias(q, k), mask.score_edge
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        hidden = None if mask.allowed is None else ~mask.allowed.to(q.device)
        scores = self.combine(scores, None if edge is None else edge.previous, mask)
        if edge is not None:
            edge.scores = scores
        return self.mix_values(masked_softmax(scores, hidden), v, mask)

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        return 2.0 * heads * queries * keys * head_width


@CORES.register(
    "prior_scores",
    traits=replace(SCORES, exact=True, previous_scores=True),
)
class PriorScores(ScoreCore):
    own_weight: Parameter
    previous_weight: Parameter

    class Config(Core.Config):
        own: float = 1.0
        """w_1, the factor of this layer's scores."""
        previous: float = 1.0
        """w_2, the factor of the previous layer's scores."""
        learned: bool = False
        """Whether each layer learns w_1 and w_2, which start at these values."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config
        if config.learned:
            self.declare(
                "own_weight", (1,), ("state",), Init("constant", value=config.own), decays=False
            )
            if self.previous_score_heads:
                self.declare(
                    "previous_weight",
                    (1,),
                    ("state",),
                    Init("constant", value=config.previous),
                    decays=False,
                )

    @classmethod
    def reads_scores(cls, config: Config) -> bool:
        return bool(config.learned or config.previous)

    def combine(self, scores: Tensor, previous: Tensor | None, mask: AttentionMask) -> Tensor:
        learned = self.config.learned
        if learned or self.config.own != 1:
            scores = scores * (
                self.use(self.own_weight).to(scores.dtype) if learned else self.config.own
            )
        if previous is None or not self.previous_score_heads:
            return scores
        if learned or self.config.previous != 1:
            previous = previous * (
                self.use(self.previous_weight).to(scores.dtype) if learned else self.config.previous
            )
        return scores + previous
