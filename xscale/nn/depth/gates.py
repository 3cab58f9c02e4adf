"""Gates that decide for each token which sublayers are computed, under a budget (Bapna et al. 2020, CCT).

    y = x + g f(x),  training: g = sigmoid(G(x) + alpha N(0, 1)),  evaluation: g = 1 if G(x) >= 0, else 0
    G(x) = w max(0, W x + b_p) + c,  loss = |p - mean g|

The mean is over the tokens of a sequence and all sublayers of the stack. alpha grows linearly over the run, so that the
gates learn to be decided. p is the budget of the sequence, drawn from a few in training; b_p, a bias for each budget,
is what an embedding of the budget that is added to x becomes behind W.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.nn import Parameter

from xscale.core.config import Config, NonNegativeFloat, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import instead, take
from xscale.nn.auxiliary import attach
from xscale.nn.depth.depth_pass import DepthPass, DepthState, SentTensor, StackUse
from xscale.nn.depth.edges import BlockEdges
from xscale.nn.dims import Dims
from xscale.nn.init import ZEROS, Init
from xscale.nn.module import Module
from xscale.nn.random import reseed
from xscale.nn.residual.residual_stream import RESIDUALS
from xscale.nn.roles import Role
from xscale.nn.signals import BATCH, Signal, TokenAxes
from xscale.nn.tokens import Tokens

GATES = "gates"
"""Key of the sum of the gates among what blocks hand on."""
BUDGETS = Signal[Tensor]("gates.budgets", TokenAxes((BATCH,)))
"""[B] index of each sequence's budget; None: a stack with gates draws them."""
NOISE = Signal[Tensor]("gates.noise")
"""Standard deviation of the gates' noise, a scalar tensor, which no compiled graph takes for a constant; None: there is
no noise."""


class GatesConfig(Config):
    budgets: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        default=(0.25, 0.5, 0.75, 1.0), min_length=1
    )
    """Fractions of the sublayers that a token may be computed in, in the mean over its sequence. Each sequence of a
    training batch draws one."""
    budget: float | None = Field(default=None, gt=0, le=1)
    """The budget of evaluation and generation, one of `budgets`; null: the largest."""
    hidden: PositiveInt | None = None
    """Hidden units of each gate; null: a quarter of the width."""
    noise: NonNegativeFloat = 1.0
    """Standard deviation of the noise at the end of the run, to which it grows linearly from 0."""
    bias: float = 1.0
    """Initial bias c of each gate; above 0 all sublayers are computed at first."""
    loss_weight: NonNegativeFloat = 1.0
    """Weight of the budget's loss."""

    @property
    def evaluated(self) -> float:
        """The budget of evaluation and generation."""
        return max(self.budgets) if self.budget is None else self.budget


class Gate(Module):
    """The gate of one sublayer."""

    seams = {
        "param_hook": Role.PARAMETERS_BETWEEN_REGIONS,
        "random": Role.DRAWS_BETWEEN_REGIONS,
    }
    first: Parameter
    biases: Parameter
    second: Parameter
    bias: Parameter

    def __init__(self, config: GatesConfig, width: int, init: Init) -> None:
        super().__init__()
        hidden = config.hidden or max(1, width // 4)
        self.declare("first", (hidden, width), ("state", "width"), init)
        self.declare(
            "biases", (len(config.budgets), hidden), ("state", "state"), ZEROS, decays=False
        )
        self.declare("second", (1, hidden), ("state", "state"), init)
        self.declare("bias", (1,), ("state",), Init("constant", value=config.bias), decays=False)

    def forward(self, y: Tensor, x: Tensor, tokens: Tokens, edges: BlockEdges | None) -> Tensor:
        """Return the sublayer's output y [B, T, D] times each token's gate, which is that of its input x [B, T, D]."""
        gate = self.decide(x, tokens)
        if edges is not None:
            edges.add(GATES, gate)
        return gate.to(x.dtype)[..., None] * y

    def decide(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Return each token's gate [B, T] for x [B, T, D]."""
        budgets, noise = tokens.get(BUDGETS), tokens.get(NOISE)
        assert budgets is not None, "the stack draws the budgets"
        biases = self.use(self.biases)[budgets]  # [B, F]
        hidden = torch.relu(F.linear(x, self.use(self.first)) + biases[:, None])  # [B, T, F]
        logit = hidden @ self.use(self.second)[0] + self.use(self.bias)  # [B, T]
        logit = logit.to(torch.promote_types(logit.dtype, torch.float32))
        if not self.training:
            return (logit >= 0).to(logit.dtype)
        if noise is None:
            return torch.sigmoid(logit)
        drawn = self.random.normal(logit, ("batch", "tokens"), tokens)
        return torch.sigmoid(logit + noise.to(logit.dtype) * drawn)


class GateBudget(DepthPass):
    """The budgets of a stack with gates, and their loss."""

    reads_progress = True

    key = "gates"
    config_key = "block.gates"
    reads_hidden_states = (
        "the gates, and the gates' sum, which blocks hand on, are of the hidden states"
    )
    has_edges = True
    seams = {
        "sum_over_sequence": Role.SUM_OVER_TOKENS,
        "replicated_input": Role.REPLICATED_INPUT,
        "attach_loss": Role.ON_LAST_STAGE,
    }
    averages_tokens = True
    averages_text = True
    averages_packed_text = True

    def __init__(self, config: GatesConfig, sublayers: int) -> None:
        """`sublayers`: how many the stack has, each with a gate."""
        super().__init__()
        self.config = config
        self.sublayers = sublayers

    @classmethod
    def build(
        cls, config: Any, dims: Dims, use: StackUse, blocks: Mapping[str, nn.Module]
    ) -> "GateBudget | None":
        if config.block.gates is None:
            return None
        return cls(config.block.gates, sum(len(block.order) for block in blocks.values()))  # type: ignore[arg-type, misc]

    def start(self, state: DepthState) -> None:
        """Draw the budgets, and begin with a sum of no gates. In a pipeline stage the sum is that of those before."""
        dtype = torch.promote_types(state.x.dtype, torch.float32)
        state.tokens = self.draw(state.tokens)
        state.edges = {GATES: state.x.new_zeros(state.x.shape[:-1], dtype=dtype), **state.edges}

    def finish(self, state: DepthState) -> None:
        state.x = self.attach_loss(state.x, state.edges[GATES], state.tokens)

    def sends(
        self, before: Sequence[nn.Module], after: Sequence[nn.Module]
    ) -> dict[str, SentTensor]:
        return {GATES: SentTensor(per_token=True)} if before else {}

    def draw(self, tokens: Tokens) -> Tokens:
        """Return the tokens with a budget for each sequence, and the noise of this step of the run."""
        config = self.config
        batch = len(tokens.ids)
        device = tokens.ids.device
        if tokens.get(BUDGETS) is not None:
            return tokens
        if not self.training or tokens.forward.rng_seed is None:
            evaluated = config.budgets.index(config.evaluated)
            return tokens.with_signals({BUDGETS: torch.full((batch,), evaluated, device=device)})
        # Not by the path of the module: the encoder and the decoder of a model draw the same budgets.
        reseed(tokens.forward.rng_seed, GATES)
        index = self.random.integers(len(config.budgets), (batch,), ("batch",), device)
        alpha = config.noise * (1.0 if tokens.forward.progress is None else tokens.forward.progress)
        noise = torch.tensor(alpha, dtype=torch.float64, device=device)
        return tokens.with_signals({BUDGETS: index, NOISE: noise})

    def attach_loss(self, x: Tensor, total: Tensor, tokens: Tokens) -> Tensor:
        """Return the output x [B, T, D] of the stack with the budget's loss attached; `total` [B, T] are the gates.

        A seam: a pipeline stage hands the gates on.
        """
        budgets, real = tokens.get(BUDGETS), tokens.real()
        assert budgets is not None
        total = self.replicated_input(total[..., None], tokens)[..., 0]  # [B, T]
        total = total if real is None else total * real
        if tokens.any_padding() is None or real is None:
            lengths = total.new_full((len(total),), tokens.count() / tokens.fraction() / len(total))
        else:
            lengths = self.sum_over_sequence(real.sum(1).to(total.dtype))
        mean = self.sum_over_sequence(total.sum(1)) / (self.sublayers * lengths)  # [B]
        forward = tokens.forward
        if forward.stats is not None:
            forward.stats.add(f"{self.path}/computed", mean.mean())
        budget = mean.new_tensor(self.config.budgets)[budgets]
        loss = self.config.loss_weight * (budget - mean).abs().mean()
        # Each shard of a sequence has the whole loss, and the gradients of all shards are summed.
        weight = (
            None if forward.aux_loss_weight is None else forward.aux_loss_weight * tokens.fraction()
        )
        return attach(x, loss, weight)

    def replicated_input(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Return x [B, T, 1] of all tokens. A seam: those between the blocks may be sharded over tp."""
        return x

    def sum_over_sequence(self, sums: Tensor) -> Tensor:
        """Sum the gates [B] of a part of each sequence over its parts. A seam: a sequence may be sharded."""
        return sums


def check(config: GatesConfig | None, residual: Any, path: str) -> list[Problem]:
    """List what the gates of a block with this residual stream, by its config, cannot be."""
    if config is None:
        return []
    problems = []
    budgets = list(config.budgets)
    if budgets != sorted(set(budgets)):
        what = f"budgets are fractions that ascend, got {budgets}"
        problems.append(Problem(f"{path}.budgets", what, choices=take(sorted(set(budgets)))))
    elif config.evaluated not in budgets:
        what = f"the model is trained for the budgets {budgets}, and not for {config.evaluated:g}"
        problems.append(Problem(f"{path}.budget", what, choices=take(*budgets, None)))
    if not RESIDUALS.of(residual).part.skippable:
        what = f"a sublayer that is not computed leaves the residual stream as it is, which '{residual.kind}' does not"
        able = [entry.name for entry in RESIDUALS if entry.part.skippable]
        choices = take(None) + instead("residual", residual.kind, able)
        problems.append(Problem(path, what, choices=choices))
    return problems
