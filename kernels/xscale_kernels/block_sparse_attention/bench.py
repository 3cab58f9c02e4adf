"""What block_sparse_attention is timed on."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from xscale_kernels.bench.case import BothWays, Case, both_ways
from xscale_kernels.block_sparse_attention.layout import BlockLayout, layout_from_mask
from xscale_kernels.block_sparse_attention.op import IMPLEMENTATIONS, block_sparse_attention

TESTS = ("test_block_sparse_attention",)


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _window(blocks: int, width: int) -> torch.Tensor:
    """A causal band and a first column that all see, [1, blocks, blocks]."""
    distance = torch.arange(blocks)[:, None] - torch.arange(blocks)[None, :]
    seen = (distance >= 0) & ((distance < width) | (torch.arange(blocks) == 0)[None, :])
    return seen[None]


def flex(layout: BlockLayout, T: int) -> Callable[..., torch.Tensor]:
    """The same causal attention by FlexAttention over the same blocks; compiled, as it must be to be fast."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    mask = layout.mask()[None]  # [1, L, R, C]
    blocks = BlockMask.from_kv_blocks(
        mask.sum(-1, dtype=torch.int32),
        mask.int().argsort(-1, descending=True, stable=True).to(torch.int32),
        BLOCK_SIZE=layout.block,
        mask_mod=lambda b, h, query, key: key <= query,
        seq_lengths=(T, T),
    )
    function = torch.compile(flex_attention) if mask.is_cuda else flex_attention
    return lambda q, k, v: function(q, k, v, block_mask=blocks)


def cases(device: str) -> list[Case]:
    """Causal windows of growing sequences, against dense attention ("eager" and "sdpa" are torch's fused one)."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    B, H, K, block = (1, 32, 128, 64) if device == "cuda" else (1, 4, 64, 64)
    found = []
    for T in (4096, 16384, 65536) if device == "cuda" else (1024, 4096):
        layout = layout_from_mask(_window(T // block, 8).to(device), block)
        qkv = tuple(torch.randn(B, H, T, K, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        ways = both_ways(
            lambda q, k, v, implementation, layout=layout: block_sparse_attention(
                q, k, v, layout, causal=True, implementation=implementation
            ),
            _dense,
            IMPLEMENTATIONS,
            qkv,
        )
        ways["sdpa"] = BothWays(_dense, qkv)
        if device == "cuda":
            # On the CPU it refuses tensors that need gradients.
            ways["flex"] = BothWays(flex(layout, T), qkv)
        pairs = layout.key_blocks.numel() * block * block
        label = f"B={B} H={H} T={T} K={K} density={layout.density:.3f} {dtype}"
        found.append(Case(label, ways, flops=14.0 * B * H * pairs * K))
    return found
