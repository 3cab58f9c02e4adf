"""Ma et al. 2021 (Luna), section 3: two nested attentions, by way of a packed sequence that passes through all layers.

The packed sequence P stands before the text X: the model's `global_tokens`, which are learned. In each layer
    Y_P = MultiAtt(P, X, X),  Y_X = MultiAtt(X, Y_P, Y_P),
and the block adds P to Y_P, X to Y_X, and norms them. The core `luna` has the causal form, with slots in each layer.
"""

import torch
from torch import Tensor

from xscale.core.config import PositiveInt
from xscale.nn.attention.ops.dense import dense_attention
from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.mixer.mixer import ACTS_INSIDE, BIDIRECTIONAL, MIXERS, Mixer, RefusedPositions
from xscale.nn.mixer.without_padding import without_padding
from xscale.nn.module import Module
from xscale.nn.tokens import Tokens


class NestedAttention(Module):
    """Multi-head attention of one sequence to another."""

    def __init__(self, dims: Dims, heads: int, head_width: int, bias: bool) -> None:
        super().__init__()
        self.head_width = head_width
        inner = heads * head_width
        # Not sharded over tp: the second attention needs the sum over all heads of the first.
        self.q, self.k, self.v = (
            Linear.from_width(dims, inner, "state", bias=bias) for _ in range(3)
        )
        self.o = Linear.to_width(dims, inner, "state", bias=bias)

    def forward(self, queries: Tensor, context: Tensor) -> Tensor:
        """Attend from queries [B, T, D] to the context [B, S, D] -> [B, T, D]."""
        q = self._heads(self.q(queries))
        k = self._heads(self.k(context))
        v = self._heads(self.v(context))
        out: Tensor = self.o(dense_attention(q, k, v).transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)  # [B, H, T, K]


@MIXERS.register(
    "luna",
    traits=BIDIRECTIONAL,
    deviations=(
        "The packed sequence passes the block's feed-forward layer too; the paper's goes to the next layer without it.",
    ),
)
class LunaAttention(Mixer):
    class Config(Mixer.Config):
        heads: PositiveInt = 8
        """H, heads of both attentions."""
        head_width: PositiveInt | None = None
        """K, width of a head; null: width / heads."""
        slots: PositiveInt = 16
        """l, length of the packed sequence: the first tokens, as many as the model's global_tokens."""
        bias: bool = False
        """Whether the projections have biases."""

    heads_make_width = True
    refused_positions = RefusedPositions(
        ACTS_INSIDE, "acts inside attention, and a packed sequence has no positions"
    )

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        self.slots = config.slots
        head_width = config.head_width or dims.width // config.heads
        self.pack, self.unpack = (
            NestedAttention(dims, config.heads, head_width, config.bias) for _ in range(2)
        )

    @without_padding
    def forward(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        packed, text = x[:, : self.slots], x[:, self.slots :]
        packed = self.pack(packed, text)
        return torch.cat((packed, self.unpack(text, packed)), 1)

    def multiply_adds(self, queries: int, keys: int) -> float:
        slots = min(self.slots, queries)
        inner, width = self.pack.q.weight.shape
        # Weights are counted once for each token, and each of the two attentions multiplies a token by two of its four.
        return 4.0 * inner * slots * (queries - slots) - 4.0 * queries * inner * width
