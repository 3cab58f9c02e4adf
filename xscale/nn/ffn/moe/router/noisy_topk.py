"""Shazeer et al. 2017, the sparsely-gated layer: top-k of logits with learned noise, and two losses on the load.

H = W x + N(0, 1) softplus(W_noise x); G = softmax over the k highest of H.

Losses: CV^2 of importance, sum over tokens of G; and CV^2 of load, the sum of the probabilities with which each
expert is chosen when its noise is drawn anew (appendix A).
"""

from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.nn import Parameter

from xscale.core.errors import Problem
from xscale.nn.ffn.moe.router.balance import Losses, ZLoss, cv_squared
from xscale.nn.ffn.moe.router.router import ROUTERS, Router, RouterDims, RouterTraits, check_top_k
from xscale.nn.ffn.moe.router.select import LinearScore
from xscale.nn.ffn.moe.routing import Routing
from xscale.nn.init import ZEROS
from xscale.nn.tokens import Tokens


@ROUTERS.register(
    "noisy_topk",
    traits=RouterTraits(
        choice="token",
        top_k=None,
        drops=True,
        scope="token",
        causal=True,
        balance="loss",
        random=True,
    ),
)
class NoisyTopKRouter(Router):
    noise: Parameter

    class Config(LinearScore.Config, ZLoss.Config):
        renamed = {
            **ZLoss.Config.renamed,
            "importance": "importance_loss_weight",
            "load": "load_loss_weight",
        }

        top_k: int = Field(default=4, ge=1)
        """Experts of each token."""
        importance_loss_weight: float = Field(default=0.1, ge=0)
        """Weight of the importance loss (w_importance); 0: none."""
        load_loss_weight: float = Field(default=0.1, ge=0)
        """Weight of the load loss (w_load); 0: none."""

    def __init__(self, config: Config, dims: RouterDims) -> None:
        super().__init__()
        self.config: Any = config
        self.score = LinearScore(self, config, dims)
        self.z_loss = ZLoss(config)
        self.declare("noise", (dims.experts, dims.width), ("state", "width"), ZEROS)

    @classmethod
    def check(cls, config: Config, dims: RouterDims, path: str) -> list[Problem]:
        return check_top_k(config.top_k, dims.experts, path)

    @classmethod
    def experts_per_token(cls, config: Config, experts: int) -> float:
        return float(config.top_k)

    def forward(self, x: Tensor, tokens: Tokens) -> Routing:
        clean = self.score.logits(x, tokens)  # [N, E]
        noisy, std = clean, None
        if self.draws(tokens):
            std = F.softplus(self.score.linear(self.score.upcast(x), self.noise))
            noisy = clean + self.random.normal(clean, ("tokens", "experts")) * std
        selected = self.repeat(noisy.topk(self.config.top_k, dim=1).indices, tokens)  # [N, k]
        experts = self.replay(selected, tokens)
        weights = selected_weights = noisy.gather(1, selected).softmax(1)
        if experts is not selected:
            weights = noisy.gather(1, experts).softmax(1)
        loss, stats = self.aux_losses(tokens, clean, noisy, std, selected_weights, selected)
        return Routing.from_topk(
            experts, weights, noisy.softmax(1), loss=loss, stats=stats, selected=selected
        )

    def aux_losses(
        self,
        tokens: Tokens,
        clean: Tensor,
        noisy: Tensor,
        std: Tensor | None,
        weights: Tensor,
        experts: Tensor,
    ) -> Losses:
        """Z-loss, importance loss and load loss. Logits and noise `std` [N, E], weights and experts [N, k]."""
        loss, stats = self.z_loss.aux_losses(tokens, clean)
        if tokens.forward.aux_loss_weight is None and tokens.forward.stats is None:
            return loss, stats
        importance = torch.zeros_like(clean).scatter(1, experts, weights).sum(0)  # [E]
        stats["importance"] = cv_squared(importance)
        loss = self.config.importance_loss_weight * stats["importance"] + (
            0 if loss is None else loss
        )
        if std is not None and self.config.top_k < clean.shape[1]:
            load = selection_probabilities(clean, noisy, std, self.config.top_k).sum(0)
            stats["load_loss"] = cv_squared(load)
            loss = loss + self.config.load_loss_weight * stats["load_loss"]
        return loss, stats


def selection_probabilities(clean: Tensor, noisy: Tensor, std: Tensor, top_k: int) -> Tensor:
    """[N, E]: probability that an expert is among the k best if its own noise alone is drawn anew."""
    best = noisy.topk(top_k + 1, dim=1).values
    inside = noisy >= best[:, top_k - 1 : top_k]
    # The threshold that an expert must exceed: the k-th best of the others.
    threshold = torch.where(inside, best[:, top_k : top_k + 1], best[:, top_k - 1 : top_k])
    probabilities: Tensor = torch.special.ndtr((clean - threshold) / std)
    return probabilities
