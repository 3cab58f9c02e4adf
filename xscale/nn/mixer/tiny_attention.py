"""Liu et al. 2021 (aMLP), section 4.3: one small head of attention beside a spatial gating unit."""

import torch
from torch import Tensor

from xscale.nn.attention.ops.dense import dense_attention
from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.mixer.synthesizer import ValueCache
from xscale.nn.module import Module


class TinyAttention(Module):
    """softmax(Q K^T / sqrt(A)) V O, where Q, K and V [T, A] are maps of the layer's input, and O is [A, C]."""

    def __init__(self, dims: Dims, width: int, channels: int, *, bias: bool) -> None:
        super().__init__()
        self.causal = dims.causal
        self.width = width
        # All ranks of tensor parallelism have the one head, and each writes its own channels.
        self.qkv = Linear.from_width(dims, 3 * width, "state", bias=bias)
        self.out = Linear(width, channels, ("ffn", "state"), dims.init, bias=bias)

    def forward(self, x: Tensor, cache: ValueCache | None) -> Tensor:
        """[B, T, D] -> [B, T, C]; `cache` has the keys and values of earlier tokens."""
        q, k, v = torch.split(self.qkv(x), self.width, -1)
        if cache is not None:
            cached = cache.append(torch.cat((k, v), -1)[:, None])[:, 0]
            k, v = torch.split(cached, self.width, -1)
        queries, keys = q.shape[1], k.shape[1]
        hidden = None
        if self.causal:
            later = torch.ones(queries, keys, dtype=torch.bool, device=x.device)
            hidden = later.triu(keys - queries + 1)[None, None]
        mixed = dense_attention(q[:, None], k[:, None], v[:, None], hidden)[:, 0]
        out: Tensor = self.out(mixed)
        return out

    def multiply_adds(self, queries: int, keys: int) -> float:
        return 2.0 * self.width * queries * keys / (2 if self.causal else 1)
