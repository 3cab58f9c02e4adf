"""Lin et al. 2022, section 4.4: attention with a prior from any generator, merged with the scores in three ways.

    S = w_1 Q K^T / sqrt(K),  P = w_2 B + w_3 S_{l-1}
    add       A = softmax(S + P): softmax(S) times the density exp(P), normalised
    multiply  A = softmax(S * P), score by score
    mix       A = (1 - g) softmax(S) + g softmax(P), a mixture of two distributions

B [B, H, T, S] is what the position adds to scores (a bias by distance, a Gaussian, terms that read queries and keys),
and S_{l-1} are the scores that the previous block hands on. Attention whose weights are a prior alone has no queries:
that is the mixer `prior_only`. Without a generator (in the first block, where w_2 is 0) A is softmax(S).
"""

import math
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from xscale.core.errors import Problem
from xscale.core.requirements import kinds, take
from xscale.nn.attention.core import CORES, SCORES, CoreTraits
from xscale.nn.attention.ops.dense import grouped_matmul, masked_softmax, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.prior_scores import ScoreCore
from xscale.nn.dims import Dims
from xscale.nn.init import Init
from xscale.nn.position.position import POSITIONS


@CORES.register(
    "general_prior",
    traits=replace(SCORES, exact=True, previous_scores=True),
)
class GeneralPrior(ScoreCore):
    class Config(ScoreCore.Config):
        merge: Literal["add", "multiply", "mix"] = "add"
        """How the prior P meets the scores S; `multiply` multiplies scores, `mix` the weights' distributions."""
        own: float = 1.0
        """w_1, the factor of the layer's own scores."""
        prior: float = 1.0
        """w_2, the factor of what the position adds to scores."""
        previous: float = 0.0
        """w_3, the factor of the previous layer's scores; 0: they are not read, and none are handed on."""
        gate: float = Field(default=0.5, gt=0, lt=1)
        """g, the weight of the prior's distribution in a mixture."""
        learned: bool = False
        """Whether each layer learns w_1, w_2, w_3 and g, which start at these values."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config
        self.factors = {"own": config.own, "prior": config.prior}
        """Initial values of the factors that the output depends on, and of the gate, as a logit."""
        if self.previous_score_heads:
            self.factors["previous"] = config.previous
        if config.merge == "mix":
            self.factors["gate"] = math.log(config.gate / (1 - config.gate))
        if config.learned:
            for name, value in self.factors.items():
                self.declare(
                    f"{name}_factor", (1,), ("state",), Init("constant", value=value), decays=False
                )

    @classmethod
    def example(cls) -> Config:
        return cls.Config(previous=0.5)

    @classmethod
    def reads_scores(cls, config: Config) -> bool:
        return bool(config.previous)

    @property
    def traits(self) -> CoreTraits:
        return self.traits_of(self.config)

    @classmethod
    def traits_of(cls, config: Config) -> CoreTraits:
        declared = CORES.get("general_prior").traits
        exact = config.merge == "add" and config.own == config.prior == 1 and not config.learned
        return replace(declared, exact=exact, previous_scores=bool(config.previous))

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        position = None if dims.cross else dims.position
        where = "none" if position is None else POSITIONS.of(position).traits.where
        has_bias = where in ("bias", "scores") and config.prior
        if not has_bias and not config.previous:
            kind = "none" if position is None else position.kind
            reason = f"position '{kind}' adds nothing to scores" if config.prior else "prior is 0"
            what = f"has no generator of a prior: {'cross-attention has no position' if dims.cross else reason}"
            choices = take(1.0, key=f"{path}.previous")
            if not dims.cross and config.prior:
                choices += kinds(
                    POSITIONS.able(where="bias") + POSITIONS.able(where="scores"), "model.position"
                )
            problems.append(Problem(path, f"{what}, and previous is 0", choices=choices))
        return problems

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        scores = self._scaled(
            upcast(grouped_matmul(q, k.mT)) * q.shape[-1] ** -0.5, "own"
        )  # [B, H, T, S]
        edge = mask.score_edge
        hidden = None if mask.allowed is None else ~mask.allowed.to(q.device)
        prior = self._prior(q, k, mask, scores)
        merged = scores
        if prior is not None and self.config.merge == "add":
            merged = scores + prior
        elif prior is not None and self.config.merge == "multiply":
            merged = scores * prior
        weights = masked_softmax(merged, hidden)
        if prior is not None and self.config.merge == "mix":
            gate = self._factor("gate", scores)
            gate = gate.sigmoid() if isinstance(gate, Tensor) else self.config.gate
            weights = torch.lerp(weights, masked_softmax(prior.expand_as(weights), hidden), gate)
        if edge is not None:
            edge.scores = merged
        return self.mix_values(weights, v, mask)

    def _prior(self, q: Tensor, k: Tensor, mask: AttentionMask, scores: Tensor) -> Tensor | None:
        """P [B or 1, H, T, S] of the generators that there are; None: there is none."""
        bias = mask.score_bias(q, k)
        prior = None if bias is None else self._scaled(bias.to(scores.dtype), "prior")
        if (
            mask.score_edge is None
            or mask.score_edge.previous is None
            or not self.previous_score_heads
        ):
            return prior
        previous = self._scaled(mask.score_edge.previous, "previous")
        return previous if prior is None else prior + previous

    def _scaled(self, scores: Tensor, name: str) -> Tensor:
        factor = self._factor(name, scores)
        return scores if isinstance(factor, float) and factor == 1 else scores * factor

    def _factor(self, name: str, scores: Tensor) -> Tensor | float:
        """The factor of that name, learned or not."""
        return (
            self.use(getattr(self, f"{name}_factor")).to(scores.dtype)
            if self.config.learned
            else self.factors[name]
        )
