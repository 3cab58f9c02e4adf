"""Absolute positions that are added to the token embeddings: `learned`, `sinusoidal` and `learnable_sinusoidal`."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveFloat, PositiveInt
from xscale.core.errors import Problem
from xscale.nn.dims import Dims
from xscale.nn.init import ONES
from xscale.nn.position.position import POSITIONS, Position, PositionTraits, check_table_length
from xscale.nn.tokens import Tokens


@POSITIONS.register(
    "learned", traits=PositionTraits(where="input", relative=False, extrapolates=False, cost="0")
)
class Learned(Position):
    """Gehring et al. 2017; Devlin et al. 2019: a learned embedding per position, added to the token embeddings."""

    weight: Parameter

    class Config(Position.Config):
        length: PositiveInt | None = None
        """Positions in the table; null: the data's sequence length."""

    def __init__(self, config: Config, dims: Dims, heads: int = 0, head_width: int = 0) -> None:
        super().__init__()
        self.declare(
            "weight", (config.length or dims.length, dims.width), ("tokens", "width"), dims.init
        )

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        return check_table_length(config.length, dims, path)

    def embed(self, x: Tensor, tokens: Tokens) -> Tensor:
        return x + F.embedding(tokens.positions, self.use(self.weight))


@POSITIONS.register(
    "sinusoidal",
    traits=PositionTraits(where="input", relative=False, extrapolates=True, cost="T*D"),
)
class Sinusoidal(Position):
    """Vaswani et al. 2017, section 3.5: fixed sines and cosines of geometric wavelengths, added to the embeddings."""

    class Config(Position.Config):
        base: PositiveFloat = 10000.0
        """Ratio of the longest to the shortest wavelength, which is 2 pi."""

    def __init__(self, config: Config, dims: Dims, heads: int = 0, head_width: int = 0) -> None:
        super().__init__()
        self.base = config.base

    needs_even_width = True

    def embed(self, x: Tensor, tokens: Tokens) -> Tensor:
        half = x.shape[-1] // 2
        rates = self.rates(half, x.device)  # [D/2]
        angles = tokens.positions[..., None].float() * rates  # [B, T, D/2]
        return x + torch.stack((angles.sin(), angles.cos()), -1).flatten(-2).to(x.dtype)

    def rates(self, half: int, device: torch.device) -> Tensor:
        """Radians per position, [D/2]."""
        return self.base ** (-torch.arange(half, device=device, dtype=torch.float32) / half)


@POSITIONS.register(
    "learnable_sinusoidal",
    traits=PositionTraits(where="input", relative=False, extrapolates=True, cost="T*D"),
    deviations=("Each frequency is learned as a factor of its first value, which is Vaswani's.",),
)
class LearnableSinusoidal(Sinusoidal):
    """Wang et al. 2021, section 3: sines and cosines whose frequencies are learned, one for each pair of channels."""

    # Angles of far positions need more digits than half precision has.
    keeps_precision = True
    factors: Parameter

    class Config(Sinusoidal.Config):
        pass

    def __init__(self, config: Config, dims: Dims, heads: int = 0, head_width: int = 0) -> None:
        super().__init__(config, dims, heads, head_width)
        self.declare("factors", (dims.width // 2,), ("state",), ONES, decays=False)

    def rates(self, half: int, device: torch.device) -> Tensor:
        return super().rates(half, device) * self.use(self.factors)
