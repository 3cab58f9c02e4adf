"""Ho et al. 2019 (Axial Transformer): causal attention over a 2-D grid of tokens in raster order, one axis at a time.

A raster mask on rows and columns hides all that is above and to the right of a token, so the paper attends to earlier
rows without a mask and shifts the result down by one row. With R attention over a token's whole row, C over its column
up to its own row, and M over its row up to its own column:

    e = shift(C(x + R(x))),  y = e + M(x + e)

shift moves each row to the next one, and zeros to the first. C of the row above has read every token of all earlier
rows, so a token reaches all tokens before it in one layer, by attention over sqrt(T) keys.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from xscale.core.config import PositiveInt
from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.mixer.mixer import CAUSAL, MIXERS, Mixer, RefusedPositions
from xscale.nn.mixer.without_padding import require_one_document
from xscale.nn.module import Module
from xscale.nn.position.position import POSITIONS, Position
from xscale.nn.tokens import Tokens


@MIXERS.register(
    "axial",
    traits=replace(CAUSAL, documents=False, decode=False),
    deviations=(
        "Each mixer has the whole construction; the paper stacks layers of rows and of columns before one shift, and "
        "layers of masked rows after it, each with its own feed-forward.",
        "Positions are encoded as the model's config says; the paper adds one embedding for the row and one for the "
        "column.",
    ),
)
class AxialMixer(Mixer):
    class Config(Mixer.Config):
        heads: PositiveInt = 8
        """H, heads of each of the three attentions."""
        width: PositiveInt = 64
        """Tokens in a row of the grid."""

    heads_make_width = True
    refused_positions = RefusedPositions(
        ("bias", "scores"), "biases scores by distance in the sequence, and rows have another"
    )

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        self.config, self.head_width = config, dims.width // config.heads
        self.rows, self.columns, self.masked_row = (
            _AxisAttention(config.heads, dims) for _ in range(3)
        )
        self.position: Position | None = None
        if dims.position is not None:
            self.position = POSITIONS.build(dims.position, dims, config.heads, self.head_width)

    @classmethod
    def example(cls) -> Any:
        return cls.Config(heads=4, width=16)

    def forward(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        require_one_document(self.path, tokens)
        length, width = x.shape[1], self.config.width

        def rotate(q: Tensor) -> Tensor:
            return q if self.position is None else self.position.rotate(q, tokens)

        def by_row(x: Tensor) -> Tensor:
            # The padding of the last row reaches no token: only the next row would read it.
            padded = F.pad(x, (0, 0, 0, -length % width)).contiguous()
            return padded.view(*padded.shape[:2], -1, width, padded.shape[3])  # [B, H, R, W, K]

        def by_column(x: Tensor) -> Tensor:
            return by_row(x).transpose(2, 3)  # [B, H, W, R, K]

        def join_columns(o: Tensor) -> Tensor:
            return o.transpose(2, 3).flatten(2, 3)

        above: Tensor = self.rows(x, rotate, by_row, lambda o: o.flatten(2, 3), causal=False)
        above = self.columns(x + above, rotate, by_column, join_columns, causal=True)
        above = F.pad(above, (0, 0, width, 0))[:, :length]
        within_row: Tensor = self.masked_row(
            x + above, rotate, by_row, lambda o: o.flatten(2, 3), causal=True
        )
        return above + within_row

    def multiply_adds(self, queries: int, keys: int) -> float:
        width = self.config.width
        seen = width + (-(-keys // width) + width) / 2
        return 2.0 * queries * seen * self.config.heads * self.head_width


class _AxisAttention(Module):
    """Multi-head attention along one axis of the grid. Its weights name no heads, so tensor parallelism refuses it."""

    def __init__(self, heads: int, dims: Dims) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (Linear.from_width(dims, dims.width, "state") for _ in range(3))
        self.o = Linear.to_width(dims, dims.width, "state")

    def forward(
        self,
        x: Tensor,
        rotate: Callable[[Tensor], Tensor],
        split: Callable[[Tensor], Tensor],
        join: Callable[[Tensor], Tensor],
        *,
        causal: bool,
    ) -> Tensor:
        """Attend along the last axis but one of `split`, x [B, T, D] -> [B, T, D]; `join` undoes `split`."""
        q, k, v = (
            project(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        q, k, v = (split(heads) for heads in (rotate(q), rotate(k), v))
        o = join(self.random.attention(q, k, v, 0.0, is_causal=causal))[
            :, :, : x.shape[1]
        ]  # [B, H, T, K]
        out: Tensor = self.o(o.transpose(1, 2).flatten(2))
        return out
