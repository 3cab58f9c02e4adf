"""Lu et al. 2025 (MoBA, mixture of block attention): a query sees its own block and the top-k past blocks.

Gate of block n: q . mean of its keys; the top-k blocks (the query's own always among them) are selected without
gradient, with one softmax over all their keys.
"""

import torch
from torch import Tensor

from xscale.core.config import PositiveInt
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.chunks import pad_queries_to_keys, split_chunks
from xscale.nn.attention.ops.dense import grouped_matmul, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.ops.selected_blocks import (
    merge_attentions,
    own_block_attention,
    selected_block_attention,
)
from xscale.nn.dims import Dims


@CORES.register(
    "moba",
    traits=CoreTraits(
        causal=True,
        bidirectional=False,
        cross=False,
        per_head=True,
        cost="K * (T * (T // block) + 2 * T * block + block**2 * (top_k - 1) * (2 * (T // block) - top_k))",
        context=("ulysses",),
        decode=True,
    ),
)
class Moba(Core):
    class Config(Core.Config):
        renamed = {"top": "top_k"}

        block: PositiveInt = 64
        """Block size in tokens; the paper: 512 and more."""
        top_k: PositiveInt = 4
        """Blocks that a query sees, its own included."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config

    @classmethod
    def example(cls) -> "Moba.Config":
        """Config for sequences of a few hundred tokens."""
        return cls.Config(block=32, top_k=4)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        assert mask.causal
        size = self.config.block
        q = split_chunks(
            pad_queries_to_keys(upcast(q), mask) * q.shape[-1] ** -0.5, 2, size
        )  # [B, H, N, b, K]
        keys, values = (split_chunks(upcast(x), 2, size) for x in (k, v))
        out, total = own_block_attention(q, keys, values)
        rows = q.flatten(2, 3)  # [B, H, T, K]
        count = min(self.config.top_k - 1, keys.shape[2] - 1)
        if count > 0:
            gates = grouped_matmul(rows.detach(), keys.detach().mean(3).mT)  # [B, H, T, N]
            selected, selected_total = selected_block_attention(
                rows, keys, values, top_past_blocks(gates, count, size)
            )
            out, _ = merge_attentions(
                torch.stack((out, selected), -2), torch.stack((total, selected_total), -1)
            )
        return out[:, :, mask.offset : mask.keys].to(v.dtype)

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        size, blocks = self.config.block, -(-keys // self.config.block)
        selected = sum(min(self.config.top_k - 1, at) for at in range(blocks)) * size
        gates = blocks * size * blocks if self.config.top_k > 1 and blocks > 1 else 0
        return float(heads * head_width * (gates + 2 * size * (blocks * size + selected)))


def top_past_blocks(gates: Tensor, count: int, size: int) -> Tensor:
    """Select the `count` past blocks with the highest gates [B, H, T, N] -> [B, H, T, count], -1 for none."""
    blocks = gates.shape[-1]
    block = torch.arange(gates.shape[2], device=gates.device)[:, None] // size
    past = torch.arange(blocks, device=gates.device) < block  # [T, N]
    best = gates.masked_fill(~past, float("-inf")).topk(count, -1)
    return best.indices.masked_fill(best.values == float("-inf"), -1)
