"""Yang et al. 2021, M6-T: experts form k prototypes, and each token goes to the best expert of each of them.

y = sum_z p^z_i E^z_i(x), p^z the softmax within prototype z, i its argmax.
"""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from xscale.core.errors import Problem
from xscale.core.requirements import must_divide
from xscale.nn.ffn.moe.router.balance import AuxLoss
from xscale.nn.ffn.moe.router.router import ROUTERS, Router, RouterDims, RouterTraits
from xscale.nn.ffn.moe.router.select import LinearScore, select_topk
from xscale.nn.ffn.moe.routing import Routing
from xscale.nn.tokens import Tokens


@ROUTERS.register(
    "prototype",
    traits=RouterTraits(
        choice="token", top_k=None, drops=True, scope="token", causal=True, balance="none"
    ),
)
class PrototypeRouter(Router):
    class Config(LinearScore.Config, AuxLoss.Config):
        prototypes: int = Field(default=2, ge=1)
        """k, groups of consecutive experts."""
        aux_loss_weight: float = Field(default=0.0, ge=0)
        """Weight of the load-balancing loss; the paper has none."""

    def __init__(self, config: Config, dims: RouterDims) -> None:
        super().__init__()
        self.config: Any = config
        self.score = LinearScore(self, config, dims)
        self.balance = AuxLoss(self, config, dims)

    @classmethod
    def check(cls, config: Config, dims: RouterDims, path: str) -> list[Problem]:
        return must_divide(path, "prototypes", config.prototypes, "experts", dims.experts)

    @classmethod
    def experts_per_token(cls, config: Config, experts: int) -> float:
        return float(config.prototypes)

    def forward(self, x: Tensor, tokens: Tokens) -> Routing:
        logits = self.score.logits(x, tokens)
        prototypes = self.config.prototypes
        size = logits.shape[1] // prototypes
        # [N * k, E / k], [N * k, 1], [N * k, 1]
        gates, weights, within = select_topk(self, tokens, logits.view(-1, size), 1)
        weights = weights.view(len(x), prototypes)  # [N, k]
        selected = (
            within.view(len(x), prototypes) + torch.arange(prototypes, device=x.device) * size
        )
        experts = self.replay(selected, tokens)
        if experts is not selected:
            weights = gates.view(len(x), -1).gather(1, experts)
        probabilities = gates.view(len(x), -1) / prototypes  # [N, E], rows sum to 1
        loss, stats = self.balance.aux_losses(tokens, logits, probabilities, selected)
        return Routing.from_topk(
            experts, weights, probabilities, loss=loss, stats=stats, selected=selected
        )
