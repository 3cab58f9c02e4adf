"""Short causal convolution of each channel, as recurrent mixers have it before their state (Dao and Gu 2024, figure 6).

y_t = silu(sum_(j=0)^(k-1) w_j x_(t - k + 1 + j) + b)
"""

import torch.nn.functional as F
from torch import Tensor

from xscale.nn.neighbours import DepthwiseConvolution
from xscale.nn.tokens import Tokens


class ShortConvolution(DepthwiseConvolution):
    """A depthwise convolution of the tokens up to each one, and SiLU: [B, T, C] -> [B, T, C]."""

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Convolve x [B, T, C]."""
        return F.silu(super().forward(x, tokens))
