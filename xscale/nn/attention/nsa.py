"""Yuan et al. 2025 (native sparse attention, NSA): gated sum of compressed, selected and sliding-window attention.

Compression: a small network makes one key and value of each compression block; softmax over the blocks that are
complete. Selection: the top blocks by a query's compressed weights, always including the first block, its own and the
previous one. The gates are a sigmoid of the query. The paper gives each branch its own projections, and selects once
for all query heads of a kv_head; here the branches share keys and values, and each head selects.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import multiples_near, take
from xscale.nn.attention.block_sparse import BlockSparse
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.moba import top_past_blocks
from xscale.nn.attention.ops.chunks import pad_queries_to_keys, split_chunks
from xscale.nn.attention.ops.dense import grouped_matmul, masked_softmax, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.ops.selected_blocks import (
    merge_attentions,
    own_block_attention,
    selected_block_attention,
)
from xscale.nn.dims import Dims
from xscale.nn.init import ZEROS, Init
from xscale.nn.pattern.window import Band


@CORES.register(
    "nsa",
    traits=CoreTraits(
        normalised=False,
        causal=True,
        bidirectional=False,
        cross=False,
        per_head=True,
        cost="2 * (T // compression_stride) * (compression_block + 1) * K * K + 2 * T * (T // compression_stride) * K"
        " + T * (T // compression_stride) * (T // selection_block) + 3 * T * K + 2 * T * selection_block * K"
        " + selection_block**2 * (top_blocks - 1) * (2 * (T // selection_block) - top_blocks) * K"
        " + selection_block**2 * (1 + -(-(window - 1) // selection_block))"
        " * (2 * (T // selection_block) + (1 - window) // selection_block) * K",
        context=("ulysses",),
        decode=True,
    ),
)
class Nsa(Core):
    kernels: Parameter
    seconds: Parameter
    places: Parameter
    gates: Parameter

    class Config(Core.Config):
        renamed = {
            "run": "compression_block",
            "stride": "compression_stride",
            "block": "selection_block",
            "top": "top_blocks",
        }

        compression_block: PositiveInt = 32
        """l, keys that are compressed into one."""
        compression_stride: PositiveInt = 16
        """d, stride between the starts of compression blocks."""
        selection_block: PositiveInt = 64
        """l', keys of a selected block; a multiple of `compression_stride`."""
        top_blocks: int = Field(default=16, ge=3)
        """n, selected blocks, including the first, the query's own and the previous one."""
        window: PositiveInt = 512
        """w, keys of the sliding window, the query's own included."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config, width = config, head_width
        start = Init(std=(config.compression_block * width) ** -0.5)
        # First index: keys, values.
        self.declare(
            "kernels",
            (2, width, width, config.compression_block),
            ("state", "state", "state", "state"),
            start,
        )
        self.declare(
            "seconds", (2, width, width), ("state", "state", "state"), Init(std=width**-0.5)
        )
        self.declare(
            "places", (2, width, config.compression_block), ("state", "state", "state"), dims.init
        )
        self.declare("gates", (heads, 3, width), ("heads", "state", "state"), ZEROS)
        band = Band.Config(left=config.window - 1, right=0)
        self.near = BlockSparse(
            BlockSparse.Config(pattern=band, block=config.selection_block), dims, heads, head_width
        )

    @classmethod
    def check(cls, config: Config, dims: Any, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        stride, block = config.compression_stride, config.selection_block
        if block % stride:
            what = f"compression_stride={stride} does not divide selection_block={block}"
            choices = take(*multiples_near(block, stride))
            problems.append(Problem(f"{path}.selection_block", what, choices=choices))
        return problems

    @classmethod
    def example(cls) -> "Nsa.Config":
        """For sequences of hundreds."""
        return cls.Config(
            compression_block=8, compression_stride=4, selection_block=16, top_blocks=4, window=24
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        assert mask.causal
        rows = upcast(q) * q.shape[-1] ** -0.5
        compressed, weights = self._compressed(rows, upcast(k), upcast(v), mask)
        selected = self._selected(rows, upcast(k), upcast(v), weights.detach(), mask)
        near = self.near(q, k, v, replace(mask, dropout=0.0))
        gates = torch.sigmoid(upcast(q) @ self.use(self.gates).to(rows.dtype).mT)  # [B, H, T, 3]
        branches = torch.stack((compressed, selected, upcast(near)), -1)  # [B, H, T, K, 3]
        return (branches * gates[..., None, :]).sum(-1).to(v.dtype)

    def _compressed(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> tuple[Tensor, Tensor]:
        """The compressed branch [B, H, T, K] and its weights [B, H, T, M]."""
        keys, values = self._compress(k, 0), self._compress(v, 1)
        ends = (
            torch.arange(keys.shape[2], device=q.device) * self.config.compression_stride
            + self.config.compression_block
            - 1
        )  # [M]
        positions = torch.arange(mask.offset, mask.keys, device=q.device)
        weights = masked_softmax(grouped_matmul(q, keys.mT), ends > positions[:, None])
        return grouped_matmul(weights, values), weights

    def _compress(self, x: Tensor, which: int) -> Tensor:
        kernel, second, embedding = (
            self.use(p)[which].to(x.dtype) for p in (self.kernels, self.seconds, self.places)
        )
        rows = x.flatten(0, 1).mT  # [B*G, K, S]
        if rows.shape[2] < self.config.compression_block:
            return x[:, :, :0]
        # The network adds an embedding of each key's position in its block, which is a constant after the first layer.
        short = (
            F.conv1d(rows, kernel, stride=self.config.compression_stride)
            + (kernel * embedding).sum((1, 2))[:, None]
        )
        return (F.gelu(short.mT) @ second).view(*x.shape[:2], -1, x.shape[3])

    def _selected(
        self, q: Tensor, k: Tensor, v: Tensor, weights: Tensor, mask: AttentionMask
    ) -> Tensor:
        size = self.config.selection_block
        keys, values = (split_chunks(x, 2, size) for x in (k, v))  # [B, G, N, b, K]
        rows = split_chunks(pad_queries_to_keys(q, mask), 2, size)
        out, total = own_block_attention(rows, keys, values)
        count = min(self.config.top_blocks - 1, keys.shape[2] - 1)
        if count > 0:
            gates = self._point(weights, keys.shape[2])
            query_block = torch.arange(mask.offset, mask.keys, device=q.device)[:, None] // size
            block = torch.arange(keys.shape[2], device=q.device)
            gates = gates.masked_fill((block == 0) | (block == query_block - 1), float("inf"))
            gates = F.pad(gates, (0, 0, mask.offset, rows.shape[2] * size - mask.keys))
            past, past_total = selected_block_attention(
                rows.flatten(2, 3), keys, values, top_past_blocks(gates, count, size)
            )
            out, _ = merge_attentions(
                torch.stack((out, past), -2), torch.stack((total, past_total), -1)
            )
        return out[:, :, mask.offset : mask.keys]

    def _point(self, weights: Tensor, blocks: int) -> Tensor:
        """Map compressed weights [B, H, T, M] to selection blocks by their overlap in strides: [B, H, T, N]."""
        config = self.config
        start = (
            torch.arange(weights.shape[-1], device=weights.device)[:, None]
            * config.compression_stride
        )
        block = torch.arange(blocks, device=weights.device) * config.selection_block
        ends = torch.minimum(start + config.compression_block, block + config.selection_block)
        shared = (ends - torch.maximum(start, block)).clamp(min=0).to(
            weights.dtype
        ) / config.compression_stride
        # Few compression blocks overlap a selection block, so an indexed sum would be less work; a matmul is one call.
        return weights @ shared

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        config = self.config
        size = self.config.selection_block
        width = head_width
        runs = max(0, (keys - config.compression_block) // config.compression_stride + 1)
        blocks = -(-keys // size)
        past = sum(min(config.top_blocks - 1, at) for at in range(blocks)) * size
        compressed = (
            2 * runs * (config.compression_block + 1) * width * width + 2 * queries * runs * width
        )
        point = queries * runs * blocks if blocks > 1 else 0
        selected = 2 * size * (blocks * size + past) * width
        gates = 3 * queries * width
        return heads * (compressed + point + selected + gates) + self.near.multiply_adds(
            queries, keys, heads, width
        )
