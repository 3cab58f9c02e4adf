"""Lepikhin et al. 2020, GShard, algorithm 1: the two best experts, the second one at random.

Gates g1, g2 are divided by their sum; the second expert is used if 2 g2 > u, u uniform in [0, 1).

The load-balancing loss counts first choices only. It is the paper's times E^2, so that an even load gives 1 for any E.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from xscale.core.errors import Problem
from xscale.core.requirements import kinds, take
from xscale.nn.ffn.moe.router.balance import AuxLoss
from xscale.nn.ffn.moe.router.router import ROUTERS, Router, RouterDims, RouterTraits
from xscale.nn.ffn.moe.router.select import LinearScore, select_topk
from xscale.nn.ffn.moe.routing import Routing
from xscale.nn.tokens import Tokens


@ROUTERS.register(
    "gshard",
    traits=RouterTraits(
        choice="token", top_k=2, drops=True, scope="token", causal=True, balance="loss", random=True
    ),
)
class GShardRouter(Router):
    class Config(LinearScore.Config, AuxLoss.Config):
        renamed = {**AuxLoss.Config.renamed, "second": "second_expert_policy"}

        second_expert_policy: Literal["random", "all"] = "random"
        """random: training uses the second expert with probability min(1, 2 g2); all: always, as evaluation does."""

    def __init__(self, config: Config, dims: RouterDims) -> None:
        super().__init__()
        self.config: Any = config
        self.score = LinearScore(self, config, dims)
        self.balance = AuxLoss(self, config, dims)

    @classmethod
    def check(cls, config: Config, dims: RouterDims, path: str) -> list[Problem]:
        if dims.experts >= 2:
            return []
        what = f"gshard sends a token to two experts, and experts={dims.experts}"
        return [
            Problem(
                path,
                what,
                choices=take(2, key=f"{path.removesuffix('.router')}.experts")
                + kinds(["switch"], path),
            )
        ]

    @classmethod
    def experts_per_token(cls, config: Config, experts: int) -> float:
        return 2.0

    def forward(self, x: Tensor, tokens: Tokens) -> Routing:
        logits = self.score.logits(x, tokens)
        gates, best, selected = select_topk(self, tokens, logits, 2)  # [N, E], [N, 2], [N, 2]
        experts = self.replay(selected, tokens)
        weights = best / best.sum(1, keepdim=True)
        kept, chosen = None, selected
        if self.config.second_expert_policy == "random" and self.draws(tokens):
            drawn = self.random.uniform(weights, ("tokens",), (len(weights),))
            kept = self.repeat(use_second_expert(weights, drawn), tokens)
        if experts is not selected:
            # The given experts are all used; of those that it selects the router would have dropped some.
            chosen = selected if kept is None else selected.masked_fill(~kept, gates.shape[1])
            best, kept = gates.gather(1, experts), None
            weights = best / best.sum(1, keepdim=True)
        loss, stats = self.balance.aux_losses(tokens, logits, gates, selected[:, :1])
        return Routing.from_topk(experts, weights, gates, kept, loss, stats, chosen)


def use_second_expert(weights: Tensor, drawn: Tensor) -> Tensor:
    """Which of 2 experts are used, [N, 2] bool, by their weights [N, 2] and uniform numbers [N]: the first always."""
    return torch.stack(
        [torch.ones_like(drawn, dtype=torch.bool), 2 * weights[:, 1].detach() > drawn], dim=1
    )
