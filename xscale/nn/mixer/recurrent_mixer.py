"""Base class of mixers with a state that passes from token to token, and what several of them share.

Generation keeps the state of each head, whose size does not grow with the sequence.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.errors import Problem
from xscale.core.requirements import at_most
from xscale.nn.attention.ops.dense import upcast
from xscale.nn.attention.ops.recurrence import Recurrence
from xscale.nn.init import Init
from xscale.nn.mixer.mixer import Mixer
from xscale.nn.module import Module
from xscale.nn.norm.norm import Norm
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


class RecurrentMixer(Mixer):
    """A causal mixer of heads, each with a state; a subclass makes a `Recurrence` of x and calls `scan`."""

    seams = {
        "first_head": Role.FIRST_HEAD,
        "scan": Role.SCAN,
        "norm_all_heads": Role.NORM_OVER_HEADS,
    }
    uses_position = False
    shards_sequence = True
    heads: int
    """H, heads with a state, of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first_head = 0
        """Index in the model of the first local head: set when heads are sharded over ranks."""

    def scan(self, recurrence: Recurrence, tokens: Tokens) -> Tensor:
        """Outputs [B, H, T, K] of the recurrence. A seam: where the sequence is sharded, its state comes from other
        ranks.

        In generation the state before the new tokens comes from the forward's cache, and the one after them goes there.
        """
        if tokens.forward.cache is None:
            return recurrence.outputs_and_state()[0]
        out, tokens.forward.cache[self.path] = recurrence.outputs_and_state(
            tokens.forward.cache.get(self.path)
        )
        return out

    def norm_all_heads(self, norm: Norm, x: Tensor) -> Tensor:
        """Norm of x [B, T, H * K] over the channels of all heads. A seam: tensor parallelism shards the heads."""
        normalised: Tensor = norm(x)
        return normalised

    def split_heads(self, x: Tensor, width: int) -> Tensor:
        """[B, T, H * K] -> [B, H, T, K] for heads of width K."""
        return x.view(*x.shape[:2], -1, width).transpose(1, 2)

    def transition_size(self) -> int:
        """Numbers of a head's state and of its A (`Recurrence.transition`), which shards of a sequence exchange."""
        raise NotImplementedError

    @property
    def state_elements(self) -> int:
        """Numbers that a shard of a sequence sends to each other one, of all heads."""
        return self.heads * self.transition_size()


def check_steps(config: Any, path: str) -> list[Problem]:
    """List what is wrong with the range of initial steps."""
    if config.min_step <= config.max_step:
        return []
    what = f"{config.min_step} is more than max_step={config.max_step}"
    return [at_most(f"{path}.min_step", what, config.max_step)]


class StepDecay(Module):
    """Decay of a state by a step that each token chooses, one for each head (Gu and Dao 2023, section 3.6).

    step = softplus(x + bias),  log decay = -exp(log_rate) step
    """

    keeps_precision = True
    log_rate: Parameter
    bias: Parameter

    def __init__(self, heads: int, rates: tuple[float, float], steps: tuple[float, float]) -> None:
        """`rates`: bounds of the initial rates, which are uniform; `steps`: of the steps, whose logarithms are."""
        super().__init__()
        self.declare(
            "log_rate", (heads,), ("heads",), Init("log_of_uniform", bounds=rates), decays=False
        )
        self.declare("bias", (heads,), ("heads",), Init("step_bias", bounds=steps), decays=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, H] -> log decays and steps, both [B, H, T], in float32 at least."""
        # In the layout of its gradient: a compiled softplus has backward in that of its input.
        logits = upcast(x).transpose(1, 2).contiguous()
        step = F.softplus(logits + upcast(self.use(self.bias))[:, None])
        return -upcast(self.use(self.log_rate)).exp()[:, None] * step, step
