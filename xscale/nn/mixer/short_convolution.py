"""Short causal convolution of each channel, as recurrent mixers have it before their state (Dao and Gu 2024, figure 6).

y_t = silu(sum_(j=0)^(k-1) w_j x_(t - k + 1 + j) + b)
"""

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.nn.axes import Axis
from xscale.nn.init import Init
from xscale.nn.neighbours import NeighbourReader, same_document
from xscale.nn.tokens import Tokens


class ShortConvolution(NeighbourReader):
    """A kernel of `size` numbers for each of C channels, and SiLU: [B, T, C] -> [B, T, C].

    It reads zeros before the first token of a document.
    """

    weight: Parameter

    def __init__(self, channels: int, axis: Axis, size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.left = size - 1
        self.sharded_over_tp = axis == "heads"
        init = Init("uniform", bounds=(-(size**-0.5), size**-0.5))
        self.declare("weight", (channels, size), (axis, "tokens"), init)
        self.bias: Tensor | None
        if bias:
            self.declare("bias", (channels,), (axis,), init, decays=False)
        else:
            self.bias = None

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Convolve x [B, T, C]."""
        near, documents = self.with_neighbours(x, tokens)  # [B, k - 1 + T, C]
        weight, length = self.use(self.weight), x.shape[1]
        window = None if documents is None else same_document(documents, self.left, 0)  # [B, T, k]
        y = None if self.bias is None else self.use(self.bias)
        for step in range(self.left + 1):
            term = near.narrow(1, step, length) * weight[:, step]
            if window is not None:
                term = term * window[..., step, None]
            y = term if y is None else y + term
        assert y is not None
        return F.silu(y)

    @property
    def exchanged_width(self) -> int:
        return len(self.weight)
