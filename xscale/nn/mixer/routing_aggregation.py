"""Li et al. 2019 (routing-by-agreement): the heads are aggregated by capsule routing before the output projection.

Each head h votes for each of N output capsules, V_hn = W_hn o_h, and their agreement decides how the votes are weighed.

    dynamic (Sabour et al. 2017):  c_h = softmax_n(b_h),  v_n = squash(sum_h c_hn V_hn),  b_hn <- b_hn + v_n V_hn
    em (Hinton et al. 2018):  R_hn weighs the votes to a Gaussian (mu_n, sigma_n^2) of each capsule, whose activation is
        a_n = sigmoid(lambda (beta_a_n - sum_d (beta_u_n + log sigma_nd) sum_h R_hn)),
        R_hn = a_n N(V_hn; mu_n, sigma_n^2) / (the sum over n);  the capsule is a_n mu_n

squash(s) = |s|^2 / (1 + |s|^2) s / |s|. Both repeat their steps a few times, for each token by itself.
"""

import math
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveFloat, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import must_divide
from xscale.nn.attention.ops.dense import upcast
from xscale.nn.dims import Dims
from xscale.nn.init import ZEROS
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import CAUSAL_OR_BIDIRECTIONAL, MIXERS

FLOOR = 1e-6
"""Added to variances, which are 0 where all votes agree."""


@MIXERS.register(
    "routing_aggregation",
    traits=replace(CAUSAL_OR_BIDIRECTIONAL, prefix=True, cross=True),
    deviations=(
        "The inverse temperature lambda of EM routing is constant; Hinton et al. raise it during training.",
    ),
)
class RoutingAggregation(Attention):
    class Config(Attention.Config):
        routing: Literal["dynamic", "em"] = "em"
        """How the votes are weighed."""
        capsules: PositiveInt | None = None
        """N, output capsules, which divide heads x head_width; null: as many as heads."""
        iterations: PositiveInt = 3
        """Rounds of routing."""
        inverse_temperature: PositiveFloat = 1.0
        """Lambda of EM routing."""

    mixes_heads = True

    votes: Parameter
    beta_a: Parameter
    beta_u: Parameter

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        self.routing, self.iterations = config.routing, config.iterations
        self.inverse_temperature = config.inverse_temperature
        capsules = config.capsules or config.heads
        channels = config.heads * self.head_width // capsules
        shape = (config.heads, capsules, channels, self.head_width)
        self.declare("votes", shape, ("state", "state", "state", "state"), dims.init)
        if config.routing == "em":
            self.declare("beta_a", (capsules,), ("state",), ZEROS, decays=False)
            self.declare("beta_u", (capsules,), ("state",), ZEROS, decays=False)

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        inner = config.heads * (config.head_width or dims.width // config.heads)
        if config.capsules is not None:
            problems += must_divide(
                path, "capsules", config.capsules, "the {} channels of the heads", inner
            )
        return problems

    def project_output(self, o: Tensor) -> Tensor:
        heads = o.transpose(1, 2)  # [B, T, H, K]
        votes = torch.einsum("bthk,hnck->bthnc", heads, self.use(self.votes))
        votes = upcast(votes)  # [B, T, H, N, C]
        capsules = self.route_dynamic(votes) if self.routing == "dynamic" else self.route_em(votes)
        out: Tensor = self.o(capsules.flatten(2).to(o.dtype))
        return out

    def route_dynamic(self, votes: Tensor) -> Tensor:
        """Votes [B, T, H, N, C] -> capsules [B, T, N, C]."""
        logits = torch.zeros_like(votes[..., 0])  # [B, T, H, N]
        for step in range(self.iterations):
            capsules = squash((logits.softmax(-1)[..., None] * votes).sum(2))  # [B, T, N, C]
            if step < self.iterations - 1:
                logits = logits + (votes * capsules[:, :, None]).sum(-1)
        return capsules

    def route_em(self, votes: Tensor) -> Tensor:
        """Votes [B, T, H, N, C] -> capsules [B, T, N, C]."""
        beta_a, beta_u = (self.use(beta).to(votes.dtype) for beta in (self.beta_a, self.beta_u))
        log_weights = torch.full_like(
            votes[..., 0], -math.log(votes.shape[3])
        )  # log R [B, T, H, N]
        for step in range(self.iterations):
            # Weights relative to their sum over the heads, which may be too small for a number.
            shares = log_weights.softmax(2)[..., None]
            mean = (shares * votes).sum(2)  # [B, T, N, C]
            distances = (votes - mean[:, :, None]).square()  # [B, T, H, N, C]
            variance = (shares * distances).sum(2) + FLOOR
            cost = (beta_u[:, None] + 0.5 * variance.log()).sum(-1) * log_weights.exp().sum(2)
            log_activation = F.logsigmoid(self.inverse_temperature * (beta_a - cost))  # [B, T, N]
            if step < self.iterations - 1:
                log_density = -0.5 * (
                    distances / variance[:, :, None] + variance.log()[:, :, None]
                ).sum(-1)
                log_weights = (log_activation[:, :, None] + log_density).log_softmax(-1)
        return log_activation.exp()[..., None] * mean


def squash(x: Tensor) -> Tensor:
    """Shorten vectors [..., C] to lengths below 1 (Sabour et al. 2017)."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length / (1 + length.square()) * x
