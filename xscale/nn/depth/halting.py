"""Adaptive computation time (Graves 2016): a token halts after some block, by a unit that learns when.

A token is done with step t, from 1, when its halting probabilities sum up to 1 - epsilon, or at the last step:

    p_t = sigmoid(w s_t + b),  N = min {t: p_1 + ... + p_t >= 1 - epsilon},  R = 1 - (p_1 + ... + p_{N-1})
    output = sum_{t<N} p_t s_t + R s_N,  ponder cost = N + R

s_t [B, T, D] are the hidden states after step t (Graves, section 2). The state of a token that is done is copied to all
later steps, where others attend to it (Dehghani et al. 2019, section 2.2).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import Parameter

from xscale.core.config import Config, NonNegativeFloat
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.auxiliary import attach, mean_over_text
from xscale.nn.depth.depth_pass import DepthPass, DepthState, SentTensor, StackUse
from xscale.nn.dims import Dims
from xscale.nn.init import Init
from xscale.nn.mixer.mixer import hands_on_scores, without_scores
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


class HaltingConfig(Config):
    epsilon: float = Field(default=0.01, gt=0, lt=1)
    """A token halts when its probabilities sum up to 1 - epsilon."""
    ponder_weight: NonNegativeFloat = 0.01
    """Weight of the ponder cost, N + R in the mean over tokens, in the loss."""
    bias: float = 1.0
    """Initial bias b of the halting unit; 1, as Graves takes, lets tokens halt early at first."""


@dataclass(frozen=True)
class Pondered:
    """Every token's computation so far."""

    output: Tensor
    """[B, T, D], the weighted sum of the states so far."""
    total: Tensor
    """[B, T], the sum of the probabilities of the steps that the token has gone through without halting."""
    steps: Tensor
    """[B, T], the steps that the token was computed in."""
    remainder: Tensor
    """[B, T], R; 0 while the token is computed."""
    running: Tensor
    """Bool [B, T]."""


SENT = {
    "output": SentTensor(precise=True),
    **{name: SentTensor(per_token=True) for name in ("total", "steps", "remainder", "running")},
}
"""Fields of `Pondered` that the stages of a pipeline hand on."""


class Halting(DepthPass):
    """The halting unit of a stack, of which each block is a step."""

    key = "halting"
    reads_hidden_states = "a token that halts has one output"
    averages_tokens = True
    averages_text = True
    averages_packed_text = True
    used_by_all_blocks = True
    seams = {
        "param_hook": Role.PARAMETERS_BETWEEN_REGIONS,
        "replicated_input": Role.REPLICATED_INPUT,
        "sum_over_sequence": Role.SUM_OVER_TOKENS,
    }
    weight: Parameter
    bias: Parameter

    def __init__(self, config: HaltingConfig, dims: Dims) -> None:
        super().__init__()
        self.config = config
        self.depth = dims.depth
        self.is_last = True
        """Whether the last step is here, and not in a later stage of a pipeline."""
        self.declare("weight", (1, dims.width), ("state", "width"), dims.init)
        self.declare("bias", (1,), ("state",), Init("constant", value=config.bias), decays=False)

    @classmethod
    def check(cls, config: Any, dims: Dims, path: str, use: StackUse) -> list[Problem]:
        if config.halting is None or not hands_on_scores(config):
            return []
        what = "a token that has halted has no scores to hand on"
        return [Problem(f"{path}.halting", what, choices=take(None) + without_scores(config))]

    @classmethod
    def build(
        cls, config: Any, dims: Dims, use: StackUse, blocks: Mapping[str, nn.Module]
    ) -> "Halting | None":
        return None if config.halting is None else cls(config.halting, dims)

    def sends(
        self, before: Sequence[nn.Module], after: Sequence[nn.Module]
    ) -> dict[str, SentTensor]:
        return {f"{self.key}.{name}": about for name, about in SENT.items()}

    def start(self, state: DepthState) -> None:
        """Begin with tokens that are all computed; in a pipeline stage as the stage before has left them."""
        received = {
            name: state.edges[f"{self.key}.{name}"]
            for name in SENT
            if f"{self.key}.{name}" in state.edges
        }
        state.edges = {
            name: edge for name, edge in state.edges.items() if not name.startswith(f"{self.key}.")
        }
        if not received:
            state.kept[self.key] = self.begin(state.x)
            return
        state.kept[self.key] = Pondered(**{**received, "running": received["running"] > 0})

    def after_block(self, state: DepthState) -> None:
        pondered, last = state.kept[self.key], state.layer + 1 == self.depth
        state.x, state.kept[self.key] = self.take_step(pondered, state.before, state.x, last=last)

    def finish(self, state: DepthState) -> None:
        pondered: Pondered = state.kept[self.key]
        if self.is_last:
            state.x = self.combine(pondered, state.tokens).to(state.x.dtype)
            return
        for name in SENT:
            state.edges[f"{self.key}.{name}"] = getattr(pondered, name).to(pondered.total.dtype)

    def keep_blocks(self, layers: Sequence[str]) -> None:
        self.is_last = str(self.depth - 1) in layers

    def begin(self, x: Tensor) -> Pondered:
        """Return the state before the first step on x [B, T, D]."""
        zeros = torch.zeros(
            x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device
        )
        return Pondered(
            torch.zeros_like(x, dtype=zeros.dtype),
            zeros,
            zeros,
            zeros,
            torch.ones_like(zeros).bool(),
        )

    def take_step(
        self, state: Pondered, before: Tensor, after: Tensor, *, last: bool
    ) -> tuple[Tensor, Pondered]:
        """Return what the next step reads and the new state: `before` and `after` a step [B, T, D]."""
        logit = after @ self.use(self.weight)[0] + self.use(self.bias)
        p = torch.sigmoid(logit.to(state.total.dtype))  # [B, T]
        total = state.total + p
        halts = state.running & ((total >= 1 - self.config.epsilon) | last)
        goes_on = state.running & ~halts
        remainder = torch.where(halts, 1 - state.total, state.remainder)
        weight = torch.where(halts, remainder, torch.where(goes_on, p, 0.0))
        pondered = replace(
            state,
            output=state.output + weight[..., None] * after,
            total=torch.where(goes_on, total, state.total),
            steps=state.steps + state.running,
            remainder=remainder,
            running=goes_on,
        )
        return torch.where(state.running[..., None], after, before), pondered

    def combine(self, state: Pondered, tokens: Tokens) -> Tensor:
        """Return the outputs [B, T, D], with the ponder cost attached as an auxiliary loss."""
        forward, real = tokens.forward, tokens.real()
        steps, remainder = (
            self._of_all(values, tokens) for values in (state.steps, state.remainder)
        )
        cost = mean_over_text(steps + remainder, real, self.sum_over_sequence)
        if forward.stats is not None:
            forward.stats.add(
                f"{self.path}/steps", mean_over_text(steps, real, self.sum_over_sequence)
            )
        # Each shard of a sequence has the whole loss, and the gradients of all shards are summed.
        weight = (
            None if forward.aux_loss_weight is None else forward.aux_loss_weight * tokens.fraction()
        )
        return attach(state.output, self.config.ponder_weight * cost, weight)

    def _of_all(self, values: Tensor, tokens: Tokens) -> Tensor:
        """Return values of all `tokens`, for those [B, T] between regions."""
        return self.replicated_input(values[..., None], tokens)[..., 0]

    def replicated_input(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Return x [B, T, 1] of all tokens. A seam: those whose sequence is sharded over tp."""
        return x

    def sum_over_sequence(self, sums: Tensor) -> Tensor:
        """Sum over the tokens of all sequences what a shard of them has. A seam: a sequence may be sharded."""
        return sums
