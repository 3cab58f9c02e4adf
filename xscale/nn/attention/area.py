"""Li et al. 2019 (area attention): attend to areas of adjacent tokens, by the mean of their keys and sum of values."""

import torch
from torch import Tensor

from xscale.core.config import PositiveInt
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.dense import dense_attention
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims


@CORES.register(
    "area",
    traits=CoreTraits(
        normalised=False,
        causal=True,
        bidirectional=True,
        cross=True,
        per_head=True,
        cost="2 * T * S * max_area_size * K",
        context=("ulysses",),
        dropout=True,
        documents=True,
        decode=True,
    ),
)
class Area(Core):
    class Config(Core.Config):
        renamed = {"longest": "max_area_size"}

        max_area_size: PositiveInt = 3
        """Maximum number of tokens in an area."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.max_area_size = config.max_area_size

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        sizes = range(1, min(self.max_area_size, k.shape[2]) + 1)
        keys = torch.cat([_area_sums(k, size) / size for size in sizes], 2)
        values = torch.cat([_area_sums(v, size) for size in sizes], 2)
        hidden = None
        if mask.allowed is not None:
            # A query sees an area if it sees all its tokens.
            allowed = [mask.allowed.unfold(-1, size, 1).all(-1) for size in sizes]
            hidden = ~torch.cat(allowed, -1).to(q.device)
        return dense_attention(
            q, keys, values, hidden, lambda weights: self.drop_weights(weights, mask)
        )

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        areas = sum(keys - smaller for smaller in range(min(self.max_area_size, keys)))
        return 2.0 * heads * queries * areas * head_width


def _area_sums(x: Tensor, size: int) -> Tensor:
    """Sums of `size` adjacent tokens: [B, G, S, K] -> [B, G, S - size + 1, K]."""
    return x if size == 1 else x.unfold(2, size, 1).sum(-1)
