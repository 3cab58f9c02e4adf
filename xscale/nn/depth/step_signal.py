"""Dehghani et al. 2019 (Universal Transformer), section 2.1: sinusoids of the position and of the block's number."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.depth.depth_pass import DepthPass, DepthState, StackUse
from xscale.nn.dims import Dims
from xscale.nn.tokens import Tokens


class StepSignal(DepthPass):
    """Adds the signal of a step to what each block reads."""

    key = "step_signal"

    @classmethod
    def check(cls, config: Any, dims: Dims, path: str, use: StackUse) -> list[Problem]:
        if not config.step_signal or dims.width % 2 == 0:
            return []
        what = f"pairs of channels have a sine and a cosine, and width={dims.width} is odd"
        return [Problem(f"{path}.step_signal", what, "Or take an even width.", choices=take(False))]

    @classmethod
    def build(cls, config: Any, dims: Dims, use: StackUse, blocks: Mapping[str, nn.Module]) -> "StepSignal | None":
        return cls() if config.step_signal else None

    def reads_full_sequence(self) -> str | None:
        return self.key

    def before_block(self, state: DepthState) -> None:
        # Steps are counted from 1.
        state.x = state.x + step_signal(state.x, state.tokens, state.layer + 1)


def step_signal(x: Tensor, tokens: Tokens, step: int) -> Tensor:
    """Sinusoids of each token's position plus those of the step, from 1 (Dehghani et al. 2019, equations 6 and 7).

    The result has the shape and dtype of x [B, T, D].
    """
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)  # [D/2]
    angles = tokens.positions[..., None].float() * rates  # [B, T, D/2]
    time = step * rates
    signal = torch.stack((angles.sin() + time.sin(), angles.cos() + time.cos()), -1)
    return signal.flatten(-2).to(x.dtype)
