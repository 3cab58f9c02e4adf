"""Base class of mixers whose weights come from no product of queries and keys: values, heads and output projection.

    y = concat_h(A_h V_h) W_o,  V = x W_v

A subclass makes the weights A_h from positions, from parameters, or from each token alone.
"""

from typing import Any

from torch import Tensor

from xscale.core.config import PositiveInt
from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.mixer.mixer import Mixer
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


class ValueMixer(Mixer):
    class Config(Mixer.Config):
        heads: PositiveInt = 8
        """H, heads of the values."""
        head_width: PositiveInt | None = None
        """K, width of a head; null: width / heads."""
        bias: bool = False
        """Whether the projections of values and output have biases."""

    heads_make_width = True
    uses_position = False
    seams = {"first_head": Role.FIRST_HEAD}

    def __init__(self, config: Any, dims: Dims) -> None:
        super().__init__()
        self.head_width: int = config.head_width or dims.width // config.heads
        self.causal = dims.causal
        self.first_head = 0
        """Index in the model of the first local head: set when heads are sharded over ranks."""
        inner = config.heads * self.head_width
        self.v = Linear.from_width(dims, inner, "heads", bias=config.bias)
        self.o = Linear.to_width(dims, inner, "heads", bias=config.bias)

    def forward(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        return self.project_output(self.mix(x, self.values(x), tokens))

    def values(self, x: Tensor) -> Tensor:
        """[B, T, D] -> the heads' values [B, H, T, K]."""
        v = self.v(x)
        return v.view(*v.shape[:2], -1, self.head_width).transpose(1, 2)  # type: ignore[no-any-return]

    def project_output(self, mixed: Tensor) -> Tensor:
        """Project the heads' weighted values [B, H, T, K] to the width: [B, T, D]."""
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out

    def mix(self, x: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
        """Weighted sums of the values v [B, H, T, K] -> [B, H, T, K]; x [B, T, D] is the mixer's input.

        In generation v are those of the new tokens, and the cache holds what the mixer keeps of the earlier ones.
        """
        raise NotImplementedError

    @property
    def heads(self) -> int:
        """H, of all ranks."""
        return len(self.v.weight) // self.head_width
