"""Zhou et al. 2022: each expert takes the tokens that score it highest, so that every expert is exactly full.

S = softmax(W x) over experts; expert e takes the n c / E tokens of highest S[:, e], with these as weights.
"""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from xscale.core.errors import Problem
from xscale.core.requirements import at_most
from xscale.nn.ffn.moe.router.balance import ZLoss
from xscale.nn.ffn.moe.router.router import ROUTERS, Router, RouterDims, RouterTraits
from xscale.nn.ffn.moe.router.select import LinearScore
from xscale.nn.ffn.moe.routing import Routing
from xscale.nn.ffn.moe.segments import Segments, sequences_of
from xscale.nn.tokens import Tokens


@ROUTERS.register(
    "expert_choice",
    traits=RouterTraits(
        choice="expert", top_k=None, drops=False, scope="batch", causal=False, balance="assignment"
    ),
)
class ExpertChoiceRouter(Router):
    class Config(LinearScore.Config, ZLoss.Config):
        renamed = {**ZLoss.Config.renamed, "capacity": "capacity_factor", "over": "input_batch"}

        capacity_factor: float = Field(default=2.0, gt=0)
        """c, mean number of experts of a token."""
        input_batch: Literal["micro_batch", "sequence"] = "micro_batch"
        """The n tokens that an expert chooses from: each capacity group of the micro-batch, or each sequence."""

    def __init__(self, config: Config, dims: RouterDims) -> None:
        super().__init__()
        self.config: Any = config
        self.groups = dims.groups
        self.score = LinearScore(self, config, dims)
        self.z_loss = ZLoss(config)

    @classmethod
    def check(cls, config: Config, dims: RouterDims, path: str) -> list[Problem]:
        if config.capacity_factor <= dims.experts:
            return []
        what = f"capacity_factor={config.capacity_factor} exceeds experts={dims.experts}"
        return [at_most(f"{path}.capacity_factor", what, float(dims.experts))]

    @classmethod
    def experts_per_token(cls, config: Config, experts: int) -> float:
        return float(config.capacity_factor)

    def forward(self, x: Tensor, tokens: Tokens) -> Routing:
        logits = self.score.logits(x, tokens)
        scores = logits.softmax(1)
        by_sequence = self.config.input_batch == "sequence"
        segments = sequences_of(tokens) if by_sequence else Segments.even(len(scores), self.groups)
        token, expert, weights = select_tokens(scores, self.config.capacity_factor, segments)
        if tokens.forward.choices is not None:
            # The forward gathers too, so that it saves the same tensors as its recomputation.
            token = self.repeat(token, tokens)
            weights = scores[token, expert]
        loss, stats = self.z_loss.aux_losses(tokens, logits)
        return Routing(
            token=token, expert=expert, weight=weights, probabilities=scores, loss=loss, stats=stats
        )


def select_tokens(
    scores: Tensor, capacity_factor: float, segments: Segments
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, experts and weights [M] of the assignments that experts make by their scores [N, E].

    Each expert chooses from each segment by itself, or from all tokens if segments of one length do not divide N.
    """
    count = len(scores)
    if segments.lengths is not None:
        return _select_from_each(scores, capacity_factor, segments.lengths)
    groups = segments.count if segments.divides(count) else 1
    return _select_from_equal(scores, capacity_factor, groups)


def _select_from_equal(
    scores: Tensor, capacity_factor: float, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Assignments [M] of experts that choose from each of `groups` equal parts of the tokens."""
    count, experts = scores.shape
    length = count // groups
    capacity = max(1, min(length, int(length * capacity_factor / experts)))
    weights, index = scores.view(groups, length, experts).topk(
        capacity, dim=1
    )  # [groups, capacity, E]
    token = index + torch.arange(groups, device=scores.device)[:, None, None] * length
    expert = torch.arange(experts, device=scores.device).expand_as(token)
    return token.reshape(-1), expert.reshape(-1), weights.reshape(-1)


def _select_from_each(
    scores: Tensor, capacity_factor: float, lengths: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Assignments [M] of experts that choose from each sequence of these lengths."""
    tokens, experts, weights = [], [], []
    start = 0
    for part in torch.split(scores, list(lengths)):
        token, expert, weight = _select_from_equal(part, capacity_factor, 1)
        tokens.append(token + start)
        experts.append(expert)
        weights.append(weight)
        start += len(part)
    return torch.cat(tokens), torch.cat(experts), torch.cat(weights)
