"""Dehghani et al. 2019, Universal Transformers: a transition of two separable convolutions (Chollet 2017).

    h = max(0, W_1 depthwise_1(x) + b_1),  out = W_2 depthwise_2(h) + b_2

A depthwise convolution mixes the tokens of each channel, the pointwise map behind it the channels of each token. In a
bidirectional model the kernels lie around a token, in a causal one they end at it; beyond the ends of a document they
read zeros. Kernels of 3 and of 5 tokens are the authors' (tensor2tensor, `transformer_ffn_type = "sepconv"`).
"""

from pydantic import Field
from torch import Tensor

from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import FFNS, Activation, Ffn, FfnTraits, activation
from xscale.nn.linear import Linear
from xscale.nn.neighbours import DepthwiseConvolution
from xscale.nn.tokens import Tokens


@FFNS.register(
    "separable_conv", traits=FfnTraits(per_token=False, sparse=False, reads_neighbours=True)
)
class SeparableConv(Ffn):
    class Config(Ffn.Config):
        hidden: int | None = Field(default=None, ge=1)
        """F, the width between the two convolutions; null: four times the model's width."""
        kernel_sizes: tuple[int, int] = (3, 5)
        """Tokens that the kernels of the two convolutions read."""
        activation: Activation = "relu"
        """Nonlinearity between the two convolutions."""
        bias: bool = True
        """Whether the pointwise maps have biases."""

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        hidden = config.hidden or 4 * dims.width
        first, second = config.kernel_sizes
        self.activation = activation(config.activation)
        right = [0 if dims.causal else size // 2 for size in (first, second)]
        self.mix = DepthwiseConvolution(dims.width, "width", first, right=right[0])
        self.up = Linear(dims.width, hidden, ("ffn", "width"), dims.init, bias=config.bias)
        self.mix_hidden = DepthwiseConvolution(hidden, "ffn", second, right=right[1])
        self.down = Linear(
            hidden, dims.width, ("width", "ffn"), dims.residual_init, bias=config.bias
        )

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        hidden = self.activation(self.up(self.mix(x, tokens)))
        down: Tensor = self.down(self.mix_hidden(hidden, tokens))
        return down
