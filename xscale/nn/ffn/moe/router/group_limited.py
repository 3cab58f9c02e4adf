"""DeepSeek-AI 2024: node-limited routing. Experts form groups (one per node), and a token's k come from a few only."""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from xscale.core.errors import Problem
from xscale.core.requirements import at_most, must_divide, take
from xscale.nn.ffn.moe.router.balance import AuxLoss, BiasUpdate
from xscale.nn.ffn.moe.router.router import ROUTERS, Router, RouterDims, RouterTraits, check_top_k
from xscale.nn.ffn.moe.router.select import (
    LinearScore,
    TopKConfig,
    combine_weights,
    gates_of,
    probabilities_of,
)
from xscale.nn.ffn.moe.routing import Routing
from xscale.nn.tokens import Tokens


@ROUTERS.register(
    "group_limited",
    traits=RouterTraits(
        choice="token", top_k=None, drops=True, scope="token", causal=True, balance="loss"
    ),
)
class GroupLimitedRouter(Router):
    class Config(LinearScore.Config, AuxLoss.Config, TopKConfig, BiasUpdate.Config):
        renamed = {**AuxLoss.Config.renamed, **BiasUpdate.Config.renamed, "limit": "topk_groups"}

        expert_groups: int = Field(default=4, ge=1)
        """Groups of consecutive experts (`n_group`)."""
        topk_groups: int = Field(default=2, ge=1)
        """Groups that a token may use (`topk_group`)."""
        group_score: Literal["max", "top2"] = "max"
        """Score of a group: its best gate (DeepSeek-V2), or the sum of its two best (DeepSeek-V3)."""

    def __init__(self, config: Config, dims: RouterDims) -> None:
        super().__init__()
        self.config: Any = config
        self.score = LinearScore(self, config, dims)
        self.balance = AuxLoss(self, config, dims)
        self.bias_update = BiasUpdate(self, config, dims)

    @classmethod
    def check(cls, config: Config, dims: RouterDims, path: str) -> list[Problem]:
        problems = check_top_k(config.top_k, dims.experts, path)
        groups, limit = config.expert_groups, config.topk_groups
        if uneven := must_divide(path, "expert_groups", groups, "experts", dims.experts):
            return [*problems, *uneven]
        if limit > groups:
            what = f"topk_groups={limit} exceeds expert_groups={groups}"
            problems.append(at_most(f"{path}.topk_groups", what, groups))
        elif config.top_k > (most := limit * (dims.experts // groups)):
            what = f"top_k={config.top_k} exceeds the {most} experts of topk_groups={limit}"
            problems.append(
                at_most(f"{path}.top_k", what, most, *take(groups, key=f"{path}.topk_groups"))
            )
        if config.group_score == "top2" and dims.experts // groups < 2:
            what = "top2 needs two experts in each group, and there is one"
            problems.append(
                Problem(
                    f"{path}.group_score", what, "Or take fewer expert_groups.", choices=take("max")
                )
            )
        return problems

    @classmethod
    def experts_per_token(cls, config: Config, experts: int) -> float:
        return float(config.top_k)

    def forward(self, x: Tensor, tokens: Tokens) -> Routing:
        config = self.config
        logits = self.score.logits(x, tokens)
        gates, bias = gates_of(logits, config.score), self.bias_update.bias()
        biased = gates if bias is None else gates + bias.to(gates.dtype)
        selected = group_limited_topk(
            biased,
            config.top_k,
            config.expert_groups,
            config.topk_groups,
            two=config.group_score == "top2",
        )
        selected = self.repeat(selected, tokens)
        experts = self.replay(selected, tokens)
        weights = combine_weights(gates.gather(1, experts), config)
        probabilities = probabilities_of(gates, config.score)
        loss, stats = self.balance.aux_losses(tokens, logits, probabilities, selected)
        return Routing.from_topk(
            experts, weights, probabilities, loss=loss, stats=stats, selected=selected
        )


def group_limited_topk(
    gates: Tensor, k: int, groups: int, topk_groups: int, *, two: bool
) -> Tensor:
    """Experts [N, k] of highest gate [N, E] among those of the `topk_groups` groups of highest score.

    A group's score is its highest gate, with `two` the sum of its two highest.
    """
    grouped = gates.view(len(gates), groups, -1)  # [N, groups, E / groups]
    group_scores = grouped.topk(2, dim=2).values.sum(2) if two else grouped.amax(2)  # [N, groups]
    best = group_scores.topk(topk_groups, dim=1).indices
    allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best, True)
    masked = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1)  # [N, E]
    return masked.topk(k, dim=1).indices
