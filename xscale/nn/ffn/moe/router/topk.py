"""The k experts that a token scores highest: `topk`, and `switch` with one expert."""

from typing import Any

from pydantic import Field
from torch import Tensor

from xscale.core.errors import Problem
from xscale.nn.ffn.moe.router.balance import AuxLoss, BiasUpdate
from xscale.nn.ffn.moe.router.router import ROUTERS, Router, RouterDims, RouterTraits, check_top_k
from xscale.nn.ffn.moe.router.select import (
    LinearScore,
    TopKConfig,
    combine_weights,
    probabilities_of,
    select_topk,
)
from xscale.nn.ffn.moe.routing import Routing
from xscale.nn.tokens import Tokens


@ROUTERS.register(
    "topk",
    traits=RouterTraits(
        choice="token", top_k=None, drops=True, scope="token", causal=True, balance="loss"
    ),
)
class TopKRouter(Router):
    """Each token goes to the k experts it scores highest (Shazeer et al. 2017, without noise; Jiang et al. 2024)."""

    class Config(LinearScore.Config, AuxLoss.Config, TopKConfig, BiasUpdate.Config):
        renamed = {**AuxLoss.Config.renamed, **BiasUpdate.Config.renamed}

    def __init__(self, config: Config, dims: RouterDims) -> None:
        super().__init__()
        self.config: Any = config
        self.score = LinearScore(self, config, dims)
        self.balance = AuxLoss(self, config, dims)
        self.bias_update = BiasUpdate(self, config, dims)

    @classmethod
    def check(cls, config: Config, dims: RouterDims, path: str) -> list[Problem]:
        return check_top_k(config.top_k, dims.experts, path)

    @classmethod
    def experts_per_token(cls, config: Config, experts: int) -> float:
        return float(config.top_k)

    def forward(self, x: Tensor, tokens: Tokens) -> Routing:
        config = self.config
        logits = self.score.logits(x, tokens)
        # [N, E], [N, k], [N, k]
        gates, chosen, selected = select_topk(
            self, tokens, logits, config.top_k, config.score, self.bias_update.bias()
        )
        experts = self.replay(selected, tokens)
        if experts is not selected:
            chosen = gates.gather(1, experts)
        weights = combine_weights(chosen, config)
        probabilities = probabilities_of(gates, config.score)
        loss, stats = self.balance.aux_losses(tokens, logits, probabilities, selected)
        return Routing.from_topk(
            experts, weights, probabilities, loss=loss, stats=stats, selected=selected
        )


@ROUTERS.register(
    "switch",
    traits=RouterTraits(
        choice="token", top_k=1, drops=True, scope="token", causal=True, balance="loss", random=True
    ),
)
class SwitchRouter(Router):
    """Fedus et al. 2021, Switch Transformer: each token goes to the expert with its highest score.

    p = softmax(W x); y = p_i E_i(x) with i = argmax p.
    """

    class Config(LinearScore.Config, AuxLoss.Config):
        jitter: float = Field(default=0.01, ge=0, lt=1)
        """Training multiplies the router's input by uniform noise in [1 - jitter, 1 + jitter]."""

    def __init__(self, config: Config, dims: RouterDims) -> None:
        super().__init__()
        self.score = LinearScore(self, config, dims)
        self.balance = AuxLoss(self, config, dims)

    @classmethod
    def experts_per_token(cls, config: Config, experts: int) -> float:
        return 1.0

    def forward(self, x: Tensor, tokens: Tokens) -> Routing:
        logits = self.score.logits(x, tokens)
        # [N, E], [N, 1], [N, 1]
        probabilities, weights, selected = select_topk(self, tokens, logits, 1)
        experts = self.replay(selected, tokens)
        if experts is not selected:
            weights = probabilities.gather(1, experts)
        loss, stats = self.balance.aux_losses(tokens, logits, probabilities, selected)
        return Routing.from_topk(
            experts, weights, probabilities, loss=loss, stats=stats, selected=selected
        )
