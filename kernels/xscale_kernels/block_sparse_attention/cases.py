"""Test examples and benchmark cases of block_sparse_attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from xscale_kernels.block_sparse_attention.layout import BlockLayout, layout_from_mask
from xscale_kernels.block_sparse_attention.op import IMPLEMENTATIONS, block_sparse_attention
from xscale_kernels.cases import Case, Example, ForwardBackward, Pick, forward_backward


def _on(layout: BlockLayout, device: torch.device) -> BlockLayout:
    moved: Any = {field.name: getattr(layout, field.name) for field in fields(layout)}
    for name, value in moved.items():
        moved[name] = value.to(device) if isinstance(value, torch.Tensor) else value
    return BlockLayout(**moved)


def draw(pick: Pick) -> Example:
    """Layouts with empty rows, lengths that blocks do not divide, grouped heads, documents, ALiBi, a cap and sinks."""
    B, G, T = pick.integer(1, 2), pick.integer(1, 2), pick.integer(1, 40)
    H, S = G * pick.integer(1, 2), T + pick.choice(0, pick.integer(1, 9))
    causal, cap = pick.choice(False, True), pick.choice(None, 2.0)
    sloped, packed = pick.choice(False, True), pick.choice(False, True)
    sunk = pick.choice(False, True)
    mask = pick.integers(5, pick.choice(1, H), -(-T // 16), -(-S // 16)) > 1
    layout = layout_from_mask(mask, 16)

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *optional: torch.Tensor,
        implementation: str | None = None,
    ) -> torch.Tensor:
        named: dict[str, Any] = {"sinks": optional[0]} if sunk else {}
        named |= {"slopes": optional[int(sunk)]} if sloped else {}
        if packed:
            named |= {"query_documents": optional[-1][:, S - T :], "key_documents": optional[-1]}
        return block_sparse_attention(
            q,
            k,
            v,
            _on(layout, q.device),
            causal=causal,
            softcap=cap,
            implementation=implementation,
            **named,
        )

    slopes = (torch.rand(H, generator=pick.generator, dtype=torch.float64),) if sloped else ()
    return Example(
        run=run,
        exact=lambda *tensors: run(*tensors, implementation="reference"),
        tensors=(
            pick.normal(B, H, T, 8),
            pick.normal(B, G, S, 8),
            pick.normal(B, G, S, 5),
            *([pick.normal(H)] if sunk else []),
        ),
        given=(*slopes, pick.integers(3, B, S).sort(1).values) if packed else slopes,
        slack=10.0,
        products=True,
    )


TESTS = ("test_block_sparse_attention",)


SAYS = {
    "eager": "torch's fused attention with the pattern as its mask: the same result",
    "sdpa": "torch's fused causal attention without the pattern: a dense result, which shows what sparsity saves",
}


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def window(blocks: int, width: int) -> torch.Tensor:
    """Causal window plus a global first block, [1, blocks, blocks]."""
    distance = torch.arange(blocks)[:, None] - torch.arange(blocks)[None, :]
    seen = (distance >= 0) & ((distance < width) | (torch.arange(blocks) == 0)[None, :])
    return seen[None]


def _listed(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts [1, L, R] and key blocks [1, L, R, C] in FlexAttention's format: visible blocks first."""
    first = mask[None].int().argsort(dim=-1, descending=True, stable=True)
    return mask[None].sum(-1, dtype=torch.int32), first.to(torch.int32)


def flex_blocks(layout: BlockLayout, T: int) -> BlockMask:
    """Convert a causal layout to FlexAttention's BlockMask; blocks wholly in the past are marked full."""
    mask = layout.mask()
    diagonal = torch.eye(layout.rows, dtype=torch.bool, device=mask.device)
    return BlockMask.from_kv_blocks(
        *_listed(mask & diagonal),
        *_listed((mask & ~diagonal).tril()),
        BLOCK_SIZE=layout.block,
        mask_mod=lambda b, h, query, key: key <= query,
        seq_lengths=(T, T),
    )


def shown(layout: BlockLayout, T: int) -> torch.Tensor:
    """Convert a causal layout to a boolean token mask [1, T, T]."""
    blocks = layout.mask().repeat_interleave(layout.block, 1).repeat_interleave(layout.block, 2)
    return blocks[:, :T, :T].tril()


def cases(device: str) -> Iterator[Case]:
    """Causal windows of growing sequences, against torch's fused attention with the pattern as a mask and without."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    B, H, K = (1, 32, 128) if device == "cuda" else (1, 4, 64)
    cuda, cpu = ((4096, 64), (32768, 64), (32768, 128), (65536, 64)), ((1024, 64), (4096, 64))
    for T, block in cuda if device == "cuda" else cpu:
        layout = layout_from_mask(window(T // block, 512 // block).to(device), block)
        qkv = tuple(
            torch.randn(B, H, T, K, device=device, dtype=dtype, requires_grad=True)
            for _ in range(3)
        )
        ways = forward_backward(
            lambda q, k, v, implementation, layout=layout: block_sparse_attention(
                q, k, v, layout, causal=True, implementation=implementation
            ),
            partial(F.scaled_dot_product_attention, attn_mask=shown(layout, T)),
            IMPLEMENTATIONS,
            qkv,
        )
        ways["sdpa"] = ForwardBackward(_dense, qkv)
        if device == "cuda":
            # FlexAttention has no backward on CPU.
            blocks = flex_blocks(layout, T)
            ways["flex"] = ForwardBackward(
                partial(torch.compile(flex_attention), block_mask=blocks), qkv
            )
        pairs = layout.key_blocks.numel() * block * block
        density = layout.density(causal=True)
        label = f"B={B} H={H} T={T} K={K} block={block} density={density:.3f} {dtype}"
        at = {"length": T, "density": density}
        yield Case(label, ways, flops=14.0 * B * H * pairs * K, at=at, says=SAYS)
