"""Routers for benchmarks, whose load is known: `random` and `round_robin`."""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from xscale.core.errors import Problem
from xscale.core.requirements import take
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
from xscale.nn.random import hash63
from xscale.nn.tokens import Tokens


@ROUTERS.register(
    "random",
    traits=RouterTraits(
        choice="token",
        top_k=None,
        drops=True,
        scope="token",
        causal=True,
        balance="none",
        learned=False,
        random=True,
    ),
)
class RandomRouter(Router):
    """For benchmarks: k experts of each token drawn at random, with equal weights.

    Training draws anew each step; evaluation uses a fixed function of a token's id and position.
    """

    class Config(Router.Config):
        top_k: int = Field(default=2, ge=1)
        """Experts of each token."""

    def __init__(self, config: Config, dims: RouterDims) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.experts = dims.experts

    @classmethod
    def check(cls, config: Config, dims: RouterDims, path: str) -> list[Problem]:
        return check_top_k(config.top_k, dims.experts, path)

    @classmethod
    def experts_per_token(cls, config: Config, experts: int) -> float:
        return float(config.top_k)

    def forward(self, x: Tensor, tokens: Tokens) -> Routing:
        if self.draws(tokens):
            scores = self.random.uniform(
                x, ("tokens", "experts"), (len(x), self.experts), torch.float32
            )
        else:
            token = hash63(tokens.ids.flatten(), tokens.positions.flatten())  # [N]
            scores = hash63(token[:, None], torch.arange(self.experts, device=x.device))  # [N, E]
        selected = scores.topk(self.top_k, dim=1).indices
        experts = self.replay(selected, tokens)
        weights = torch.full(experts.shape, 1 / self.top_k, dtype=x.dtype, device=x.device)
        uniform = torch.full(
            (len(x), self.experts), 1 / self.experts, dtype=x.dtype, device=x.device
        )
        return Routing.from_topk(experts, weights, uniform, selected=selected)


@ROUTERS.register(
    "round_robin",
    aliases=("forced",),
    traits=RouterTraits(
        choice="token", top_k=None, drops=False, scope="batch", causal=True, balance="none"
    ),
)
class RoundRobinRouter(Router):
    """For benchmarks: top-k gates as usual, but experts are assigned round-robin, so that the load is known.

    Token n uses the experts n k, n k + 1, ... modulo the number of active experts. It costs as much as `topk`.
    Megatron calls this forced load balancing, torchtitan `_debug_force_load_balance`.
    """

    class Config(LinearScore.Config, AuxLoss.Config, TopKConfig, BiasUpdate.Config):
        renamed = {**AuxLoss.Config.renamed, **BiasUpdate.Config.renamed, "used": "active_experts"}

        active_experts: int | None = Field(default=None, ge=1)
        """Only the first so many experts get tokens; null: all, equally many each."""
        aux_loss_weight: float = Field(default=0.0, ge=0)
        """Weight of the load-balancing loss."""

    def __init__(self, config: Config, dims: RouterDims) -> None:
        super().__init__()
        self.config: Any = config
        self.score = LinearScore(self, config, dims)
        self.balance = AuxLoss(self, config, dims)
        self.bias_update = BiasUpdate(self, config, dims)

    @classmethod
    def check(cls, config: Config, dims: RouterDims, path: str) -> list[Problem]:
        problems = check_top_k(config.top_k, dims.experts, path)
        active = config.active_experts
        if active is not None and not config.top_k <= active <= dims.experts:
            what = f"active_experts={active} is not between top_k={config.top_k} and experts={dims.experts}"
            problems.append(
                Problem(
                    f"{path}.active_experts", what, choices=take(config.top_k, dims.experts, None)
                )
            )
        return problems

    @classmethod
    def experts_per_token(cls, config: Config, experts: int) -> float:
        return float(config.top_k)

    def forward(self, x: Tensor, tokens: Tokens) -> Routing:
        config = self.config
        logits = self.score.logits(x, tokens)
        # The usual selection is made too, so that this costs as much as `topk`.
        bias = self.bias_update.bias()
        gates, _, _ = select_topk(self, tokens, logits, config.top_k, config.score, bias)
        slots = torch.arange(len(gates) * config.top_k, device=gates.device).view(
            len(gates), -1
        )  # [N, k]
        selected = slots % (config.active_experts or gates.shape[1])
        experts = self.replay(selected, tokens)
        weights = combine_weights(gates.gather(1, experts), config)
        probabilities = probabilities_of(gates, config.score)
        loss, stats = self.balance.aux_losses(tokens, logits, probabilities, selected)
        return Routing.from_topk(
            experts, weights, probabilities, loss=loss, stats=stats, selected=selected
        )
