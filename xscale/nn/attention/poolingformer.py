"""Zhang et al. 2021 (Poolingformer): two levels, a sliding window and then a wider window of pooled keys and values.

y = attention to `window` keys on each side. The second level projects y to new queries, keys and values, and pools
neighbouring keys and values; z_i = attention to the pools that are centred at i - w, i - w + stride ... i + w, for
w = `pooled_window`; o = y + z. LDConv pools by a dynamic convolution (Wu et al. 2019): the weights of the tokens are
softmax(W_p x) of the token x in the middle, with a W_p for keys and one for values.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import at_most, multiples_near, take
from xscale.nn.attention.block_sparse import BlockSparse
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.chunks import split_chunks
from xscale.nn.attention.ops.dense import upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.init import Init
from xscale.nn.pattern.window import Band


@CORES.register(
    "poolingformer",
    traits=CoreTraits(
        normalised=False,
        causal=False,
        bidirectional=True,
        cross=False,
        per_head=True,
        cost="2 * K * (3 * window * T - 2 * window**2) + 3 * T * K * K + 2 * T * pool_size * K"
        " + 2 * K * (3 * (pooled_window // stride) * T - 2 * pooled_window**2 // stride)",
        context=("ulysses",),
        dropout=True,
    ),
    deviations=(
        "The second level projects the first level's output head by head, so that heads stay independent.",
        "Pools have their centres at multiples of the stride from the query, and those at the ends have fewer tokens.",
    ),
)
class Poolingformer(Core):
    maps: Parameter
    pool_weights: Parameter

    class Config(Core.Config):
        renamed = {
            "near": "window",
            "far": "pooled_window",
            "segment": "pooled_window",
            "pool": "pool_size",
        }

        window: PositiveInt = 64
        """Keys of the first level's window on each side of a query."""
        pooled_window: PositiveInt = 256
        """Tokens on each side of a query up to which pools of the second level have their centre; a multiple of
        `stride`."""
        pooling: Literal["ldconv", "max", "mean"] = "ldconv"
        """ldconv: weighted sum, with weights predicted from the middle token; max and mean: without parameters."""
        pool_size: PositiveInt = 5
        """Kernel size: tokens in a pool."""
        stride: PositiveInt = 4
        """Tokens between the centres of the pools that a query sees."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config
        self.first, self.second = (
            BlockSparse(
                BlockSparse.Config(pattern=Band.Config(left=size, right=size), block=size),
                dims,
                heads,
                head_width,
            )
            for size in (config.window, config.pooled_window // config.stride)
        )
        start = Init(std=head_width**-0.5)
        self.declare(
            "maps", (heads, 3, head_width, head_width), ("heads", "state", "state", "state"), start
        )
        if config.pooling == "ldconv":
            shape = (heads, 2, head_width, config.pool_size)
            self.declare("pool_weights", shape, ("heads", "state", "state", "state"), start)

    @classmethod
    def check(cls, config: Config, dims: Any, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        if config.pooled_window % config.stride:
            what = f"stride={config.stride} does not divide pooled_window={config.pooled_window}"
            problems.append(
                Problem(
                    f"{path}.pooled_window",
                    what,
                    choices=take(*multiples_near(config.pooled_window, config.stride)),
                )
            )
        if config.stride > config.pool_size:
            what = (
                f"stride={config.stride} skips tokens between pools of pool_size={config.pool_size}"
            )
            problems.append(at_most(f"{path}.stride", what, config.pool_size))
        return problems

    @classmethod
    def example(cls) -> "Poolingformer.Config":
        """For sequences of hundreds."""
        return cls.Config(window=16, pooled_window=64)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        assert not mask.causal
        y = upcast(self.first(q, k, v, mask))
        maps = self.use(self.maps).to(y.dtype)
        query, key, value = (y @ maps[:, index] for index in range(3))
        z = self._attend_to_pools(query, self._pool(key, 0), self._pool(value, 1), mask)
        return (y + z).to(v.dtype)

    def _pool(self, x: Tensor, index: int) -> Tensor:
        """The pool around each token: [B, H, T, K] -> the same shape; `index` is 0 for keys, 1 for values."""
        size, length = self.config.pool_size, x.shape[2]
        before = size // 2
        value = float("-inf") if self.config.pooling == "max" else 0.0
        padded = F.pad(x, (0, 0, before, size - 1 - before), value=value)
        windows = padded.unfold(2, size, 1)  # [B, H, T, K, W]
        if self.config.pooling == "max":
            return windows.amax(-1)
        if self.config.pooling == "mean":
            present = F.pad(x.new_ones(length), (before, size - 1 - before)).unfold(0, size, 1)
            return windows.sum(-1) / present.sum(-1, keepdim=True)
        weights = (x @ self.use(self.pool_weights)[:, index].to(x.dtype)).softmax(
            -1
        )  # [B, H, T, W]
        return (windows * weights[..., None, :]).sum(-1)

    def _attend_to_pools(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """Attention to every `stride`-th pool around a query, all [B, H, T, K].

        Queries and pools whose indices leave the same remainder by the stride form a sequence of their own, in which
        the pools that a query sees are a band.
        """
        batch = len(q)
        stride = self.config.stride
        length = q.shape[2]
        rows = [
            split_chunks(x, 2, stride).movedim(3, 1).flatten(0, 1) for x in (q, k, v)
        ]  # [B*stride, H, N, K]
        count = rows[0].shape[2]
        documents = None
        if length % stride:
            # Padding is a document of its own.
            index = (
                torch.arange(count, device=q.device) * stride
                + torch.arange(stride, device=q.device)[:, None]
            )
            documents = (index >= length).long().repeat(batch, 1)  # [B*stride, N]
        inner = AttentionMask(
            count,
            count,
            False,
            query_documents=documents,
            key_documents=documents,
            dropout=mask.dropout,
        )
        z: Tensor = self.second(*rows, inner)
        return (
            z.view(batch, stride, *z.shape[1:]).movedim(1, 3).flatten(2, 3)[:, :, :length]
        )  # [B, H, T, K]

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        config, count = self.config, -(-keys // self.config.stride)
        pooling = 2 * config.pool_size if config.pooling == "ldconv" else 0
        second = config.stride * self.second.multiply_adds(count, count, heads, head_width)
        projections = float(heads * head_width * keys * (3 * head_width + pooling))
        return self.first.multiply_adds(queries, keys, heads, head_width) + projections + second
