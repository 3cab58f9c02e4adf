"""Zhang et al. 2018: the average attention network (AAN), a cumulative mean in place of self-attention.

    g_j = FFN((1 / j) sum_{k <= j} y_k),  FFN(x) = W_2 ReLU(W_1 x + b_1) + b_2
    [i_j; f_j] = sigmoid(W [y_j; g_j] + b),  h~_j = i_j * y_j + f_j * g_j

The block adds y_j and norms, h_j = LN(y_j + h~_j), with residual post as in the paper, whose decoder has it in the
place of self-attention. Generation keeps one vector of a sequence, the sum of all y so far.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.core.config import PositiveInt
from xscale.nn.attention.ops.dense import upcast
from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.mixer.mixer import CAUSAL, MIXERS, Mixer
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


@MIXERS.register(
    "average_attention",
    traits=CAUSAL,
)
class AverageAttention(Mixer):
    class Config(Mixer.Config):
        hidden: PositiveInt | None = None
        """F, hidden width of the mixer's own feed-forward network; null: four times the model's width, as the paper."""
        bias: bool = True
        """Whether the feed-forward network and the gates have biases, as in the paper."""

    uses_position = False
    seams = {
        "first_hidden": Role.FIRST_HIDDEN,
        "sum_over_heads": Role.SUM_OVER_HEADS,
    }

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        self.width = dims.width
        width, hidden = dims.width, config.hidden or 4 * dims.width
        self.first_hidden = 0
        """Index of the first local channel of the gates: set when they are sharded over ranks."""
        self.up = Linear(width, hidden, ("ffn", "width"), dims.init, bias=config.bias)
        self.down = Linear(hidden, width, ("width", "ffn"), dims.init, bias=config.bias)
        # Channels of the gates are shared out as hidden units are: each depends on all of y and g.
        self.input_gate = Linear(2 * width, width, ("ffn", "width"), dims.init, bias=config.bias)
        self.forget_gate = Linear(2 * width, width, ("ffn", "width"), dims.init, bias=config.bias)

    def forward(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        mean = self.mean(x, tokens)
        return self.gated_sum(x, self.sum_over_heads(self.down(F.relu(self.up(mean)))))

    def mean(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Mean of each token of x [B, T, D] and those before it, in its document: [B, T, D]."""
        total = _segment_sums(upcast(x), tokens)
        counts = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]  # [T, 1]
        if tokens.documents is not None:
            counts = tokens.positions[..., None] + 1  # [B, T, 1]
        if tokens.forward.cache is not None:
            earlier, count = tokens.forward.cache.get(self.path, (torch.zeros_like(total[:, 0]), 0))
            total, counts = total + earlier[:, None], counts + count
            tokens.forward.cache[self.path] = (total[:, -1].clone(), count + x.shape[1])
        mean: Tensor = (total / counts).to(x.dtype)
        return mean

    def sum_over_heads(self, g: Tensor) -> Tensor:
        """Sum g [B, T, D] over all hidden units of the feed-forward network, from the local ones' terms. A seam."""
        return g

    def gated_sum(self, y: Tensor, g: Tensor) -> Tensor:
        """i * y + f * g, all [B, T, D], with zeros in the channels whose gates are not local."""
        both = torch.cat((y, g), -1)  # [B, T, 2 D]
        i, f = self.input_gate(both).sigmoid(), self.forget_gate(both).sigmoid()
        first, local = self.first_hidden, i.shape[-1]
        gated = i * y.narrow(-1, first, local) + f * g.narrow(-1, first, local)
        return F.pad(gated, (first, self.width - first - local)) if local < self.width else gated

    @property
    def hidden_units(self) -> int:
        """Channels of the gates, of all ranks."""
        return self.width

    @property
    def summed_channels(self) -> int:
        return self.width


def _segment_sums(x: Tensor, tokens: Tokens) -> Tensor:
    """Sum of each token of x [B, T, D] and those before it, in its document: [B, T, D]."""
    if tokens.documents is None:
        return x.cumsum(1)
    # By doubling (Hillis and Steele 1986): a difference of two sums over the sample would leave their rounding behind.
    length, span = x.shape[1], 1
    while span < length:
        earlier = F.pad(x, (0, 0, span, 0)).narrow(1, 0, length)
        # `x` has the sum of `span` tokens; a token at such a position has as many more before it in its document.
        x = x + torch.where(tokens.positions[..., None] >= span, earlier, 0.0)
        span *= 2
    return x
