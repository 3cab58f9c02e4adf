"""Dehghani et al. 2019 (Universal Transformer), section 2.1: sinusoids of the position and of the block's number."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.depth.depth_pass import DepthPass, DepthState, StackUse
from xscale.nn.dims import Dims
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


class StepSignal(DepthPass):
    """Adds the signal of a step to what each block reads."""

    key = "step_signal"
    has_static_form = True
    reads_hidden_states = "the signal of a step is added to one"
    seams = {"of_tokens": Role.SHARD_OF_TOKENS}

    @classmethod
    def check(cls, config: Any, dims: Dims, path: str, use: StackUse) -> list[Problem]:
        if not config.step_signal or dims.width % 2 == 0:
            return []
        what = f"pairs of channels have a sine and a cosine, and width={dims.width} is odd"
        return [Problem(f"{path}.step_signal", what, "Or take an even width.", choices=take(False))]

    @classmethod
    def build(
        cls, config: Any, dims: Dims, use: StackUse, blocks: Mapping[str, nn.Module]
    ) -> "StepSignal | None":
        return cls() if config.step_signal else None

    def before_block(self, state: DepthState) -> None:
        # Steps are counted from 1.
        state.x = state.x + self.of_tokens(step_signal(state.x, state.tokens, state.layer + 1))

    def of_tokens(self, signal: Tensor) -> Tensor:
        """Return the signal [B, T, D] of the tokens of x. A seam: sequence parallelism shards x."""
        return signal


def step_signal(x: Tensor, tokens: Tokens, step: int) -> Tensor:
    """Sinusoids of each token's position plus those of the step, from 1 (Dehghani et al. 2019, equations 6 and 7).

    The result [B, T, D] has the width and dtype of x [..., D].
    """
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)  # [D/2]
    angles = tokens.positions[..., None].float() * rates  # [B, T, D/2]
    time = step * rates
    signal = torch.stack((angles.sin() + time.sin(), angles.cos() + time.cos()), -1)
    return signal.flatten(-2).to(x.dtype)
