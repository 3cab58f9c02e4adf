"""Clark et al. 2022, S-BASE: tokens choose experts after Sinkhorn iterations have balanced their scores.

Training chooses the k best of a plan whose rows sum to 1 and whose columns sum to N / E; evaluation the k best
logits. The weights are gates of the logits, not of the plan.
"""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from xscale.core.errors import Problem
from xscale.nn.ffn.moe.router.balance import ZLoss
from xscale.nn.ffn.moe.router.router import ROUTERS, Router, RouterDims, RouterTraits, check_top_k
from xscale.nn.ffn.moe.router.select import LinearScore, ScoreFunction, gates_of
from xscale.nn.ffn.moe.routing import Routing
from xscale.nn.tokens import Tokens


@ROUTERS.register(
    "sinkhorn",
    traits=RouterTraits(
        choice="token", top_k=None, drops=True, scope="batch", causal=False, balance="assignment"
    ),
)
class SinkhornRouter(Router):
    class Config(LinearScore.Config, ZLoss.Config):
        top_k: int = Field(default=1, ge=1)
        """Experts of each token."""
        iterations: int = Field(default=16, ge=1)
        """Rounds of dividing columns, then rows, by their sums."""
        score: ScoreFunction = "softmax"
        """Function from logits to gates."""

    def __init__(self, config: Config, dims: RouterDims) -> None:
        super().__init__()
        self.config: Any = config
        self.score = LinearScore(self, config, dims)
        self.z_loss = ZLoss(config)

    @classmethod
    def check(cls, config: Config, dims: RouterDims, path: str) -> list[Problem]:
        return check_top_k(config.top_k, dims.experts, path)

    @classmethod
    def experts_per_token(cls, config: Config, experts: int) -> float:
        return float(config.top_k)

    def forward(self, x: Tensor, tokens: Tokens) -> Routing:
        logits = self.score.logits(x, tokens)  # [N, E]
        scores = logits.detach()
        if self.training:
            scores = balance_by_sinkhorn(scores, self.config.iterations)
        selected = self.repeat(scores.topk(self.config.top_k, dim=1).indices, tokens)
        experts = self.replay(selected, tokens)
        weights = gates_of(logits, self.config.score).gather(1, experts)
        loss, stats = self.z_loss.aux_losses(tokens, logits)
        return Routing.from_topk(
            experts, weights, logits.softmax(1), loss=loss, stats=stats, selected=selected
        )


def balance_by_sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """Logarithm of exp(logits) [N, E] scaled by rows and columns: rows sum to 1, columns nearly to N / E."""
    even = torch.tensor(
        logits.shape[0] / logits.shape[1], dtype=logits.dtype, device=logits.device
    ).log()
    for _ in range(iterations):
        logits = logits - logits.logsumexp(0, keepdim=True) + even
        logits = logits - logits.logsumexp(1, keepdim=True)
    return logits
