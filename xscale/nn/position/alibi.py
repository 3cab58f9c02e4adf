"""Press et al. 2022 (ALiBi): a linear bias on the scores, minus a fixed slope per head times the distance."""

import torch
from torch import Tensor

from xscale.nn.dims import Dims
from xscale.nn.position.position import POSITIONS, Position, PositionTraits


@POSITIONS.register(
    "alibi", traits=PositionTraits(where="bias", relative=True, extrapolates=True, cost="H*T*S")
)
class Alibi(Position):
    adds_bias = True
    linear_bias = True

    def __init__(
        self, config: Position.Config, dims: Dims, heads: int = 0, head_width: int = 0
    ) -> None:
        super().__init__()
        self.slopes = slopes(heads)

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        distance = (queries[:, :, None] - keys[:, None, :]).abs()  # [B, T, S]
        slope = torch.tensor(self.slopes, device=queries.device)[:, None, None]
        return -slope * distance[:, None]  # [B, H, T, S]


def slopes(heads: int) -> list[float]:
    """2^(-8h/H) for H a power of two; for other counts every second slope of the next power fills up."""
    power = 2 ** (heads.bit_length() - 1) if heads else 0
    first = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    between = [2 ** (-4 * (2 * head + 1) / power) for head in range(heads - power)]
    return first + between
