"""The base of routers that score experts with a linear map of the token."""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.errors import Problem
from xscale.nn.moe import loss
from xscale.nn.moe.router import Router, RouterDims
from xscale.nn.tokens import Tokens


class Scored(Router):
    """Logits = W x, with noise on the way in and losses that even them out."""

    class Config(Router.Config):
        precision: Literal["float32", "compute"] = "float32"
        """What scores are computed in: float32, or as the layer's input (float64 stays float64)."""
        jitter: float = 0.0
        """Training multiplies the router's input by uniform noise in [1 - jitter, 1 + jitter] (Fedus et al. 2021)."""
        balance: float = 0.01
        """Weight of the balancing loss; 0: none."""
        scope: Literal["micro_batch", "sequence", "global_batch"] = "micro_batch"
        """What the balancing loss evens the load over; global_batch averages loads over all ranks' micro-batches."""
        z: float = 0.0
        """Weight of the z-loss, which keeps logits small (Zoph et al. 2022: 0.001); 0: none."""

    weight: Parameter

    def __init__(self, config: Any, dims: RouterDims) -> None:
        super().__init__()
        self.config: Any = config
        self.experts = dims.experts
        self.groups = dims.groups
        self.pool: Callable[[Tensor], Tensor] | None = None
        """Seam: mean of a statistic over all ranks' micro-batches, for scope = global_batch. None: this one alone."""
        self.declare("weight", (dims.experts, dims.width), ("state", "width"), dims.start)

    @classmethod
    def check(cls, config: Any, dims: RouterDims, path: str) -> list[Problem]:
        problems = []
        if not 0 <= config.jitter < 1:
            problems.append(Problem(f"{path}.jitter", f"{config.jitter} is not in [0, 1)", "Fedus et al. take 0.01."))
        for name in ("balance", "z"):
            if getattr(config, name) < 0:
                problems.append(Problem(f"{path}.{name}", f"a loss weighs 0 or more, not {getattr(config, name)}"))
        return problems

    def noisy(self, tokens: Tokens) -> bool:
        """Whether random numbers are wanted."""
        return self.training and tokens.noise is not None

    def widen(self, x: Tensor) -> Tensor:
        """In the precision scores are computed in."""
        return x if self.config.precision == "compute" else x.to(torch.promote_types(x.dtype, torch.float32))

    def logits(self, x: Tensor, tokens: Tokens) -> Tensor:
        """[N, D] -> [N, E]."""
        x = self.widen(x)
        if self.config.jitter and self.noisy(tokens):
            x = x * torch.empty_like(x).uniform_(1 - self.config.jitter, 1 + self.config.jitter)
        return F.linear(x, self.use(self.weight).to(x.dtype))

    def losses(
        self, tokens: Tokens, logits: Tensor, probabilities: Tensor, experts: Tensor
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The weighted loss and its unweighted parts. Logits, probabilities [N, E]; experts [N, k] as chosen."""
        if tokens.auxiliary is None and tokens.tally is None:
            return None, {}
        total: Tensor | None = None
        measured: dict[str, Tensor] = {}
        if self.config.balance:
            choices = experts.shape[1]
            token = torch.arange(len(experts), device=experts.device).repeat_interleave(choices)
            segments = len(tokens.ids) if self.config.scope == "sequence" else self.groups
            pool = self.pool if self.config.scope == "global_batch" else None
            measured["aux"] = loss.balance(probabilities, token, experts.reshape(-1), segments, pool)
            total = self.config.balance * measured["aux"]
        if self.config.z:
            measured["z"] = loss.z_loss(logits)
            total = self.config.z * measured["z"] + (0 if total is None else total)
        return total, measured
