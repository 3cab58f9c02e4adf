"""Guo et al. 2019 (Gaussian Transformer): a learned Gaussian prior on the distance, added to the scores.

Attention weights are multiplied by exp(-|w d^2 + b|) at distance d, since softmax makes factors of what is added to the
scores. w >= 0 sets the width of the bell, and b <= 0 lowers the weight of the token itself.
"""

from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveFloat
from xscale.nn.dims import Dims
from xscale.nn.init import ONES
from xscale.nn.position.position import POSITIONS, Position, PositionTraits


@POSITIONS.register(
    "gaussian",
    traits=PositionTraits(where="bias", relative=True, extrapolates=True, cost="H*T*S"),
    deviations=(
        "Each head has its own w and b; the paper has one of each for all heads of a layer.",
    ),
)
class Gaussian(Position):
    adds_bias = True
    learns_relative_bias = True
    # Squares of long distances exceed what bfloat16 tells apart.
    keeps_precision = True
    weight: Parameter
    offset: Parameter

    class Config(Position.Config):
        sigma: PositiveFloat = 8.0
        """Standard deviation of the bell before training, in tokens."""

    def __init__(self, config: Config, dims: Dims, heads: int = 0, head_width: int = 0) -> None:
        super().__init__()
        self.scale = 1 / (2 * config.sigma**2)
        # The absolute values keep w >= 0 and b <= 0, and have a gradient everywhere but at 0.
        self.declare("weight", (heads,), ("heads",), ONES, decays=False)
        self.declare("offset", (heads,), ("heads",), dims.init, decays=False)

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        distance = keys[:, None, None, :] - queries[:, None, :, None]  # [B, 1, T, S]
        w, b = (
            self.use(parameter).abs()[:, None, None] for parameter in (self.weight, self.offset)
        )  # [H, 1, 1]
        return -(w * self.scale * distance.to(w.dtype).square() - b).abs()  # [B, H, T, S]
