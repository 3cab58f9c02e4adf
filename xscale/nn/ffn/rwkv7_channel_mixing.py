"""Peng et al. 2025, RWKV-7 (Goose), channel mixing: two linear maps around a squared ReLU, after a token shift.

    k_t = W_k (u_t + (u_(t-1) - u_t) mu),  out_t = W_v max(k_t, 0)^2

The token before the first one of a document is a vector of zeros.
"""

from torch import Tensor

from xscale.core.config import PositiveInt
from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import FFNS, Ffn, FfnTraits
from xscale.nn.init import ZEROS, Init
from xscale.nn.linear import Linear
from xscale.nn.neighbours import TokenShift
from xscale.nn.tokens import Tokens


@FFNS.register(
    "rwkv7_channel_mixing", traits=FfnTraits(per_token=False, sparse=False, reads_neighbours=True)
)
class Rwkv7ChannelMixing(Ffn):
    class Config(Ffn.Config):
        hidden: PositiveInt | None = None
        """F, the width between the two maps; null: four times the model's width."""

    @classmethod
    def example(cls) -> "Rwkv7ChannelMixing.Config":
        """Config with so many hidden units that of each token's about half are zero."""
        return cls.Config(hidden=1024)

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        width, hidden = dims.width, config.hidden or 4 * dims.width
        self.shift = TokenShift(width)
        rising = (1 - dims.layer / dims.depth) ** 4
        values = tuple(1 - (at / width) ** rising for at in range(width))
        self.declare("mix", (width,), ("width",), Init("values", values=values), decays=False)
        bound = 0.5 * width**-0.5
        self.up = Linear(width, hidden, ("ffn", "width"), Init("uniform", bounds=(-bound, bound)))
        self.down = Linear(hidden, width, ("width", "ffn"), ZEROS)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        mixed = x + (self.shift(x, tokens) - x) * self.use(self.get_parameter("mix"))
        down: Tensor = self.down(self.up(mixed).relu().square())
        return down
