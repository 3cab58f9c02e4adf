"""Test examples and benchmark cases of packed_attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from xscale_kernels.cases import Case, Example, ForwardBackward, Pick, forward_backward
from xscale_kernels.packed_attention.op import IMPLEMENTATIONS, packed_attention


def draw(pick: Pick) -> Example:
    """Documents of any length, one or several, causal or not, with grouped heads."""
    B, G, T, K = pick.integer(1, 2), pick.integer(1, 2), pick.integer(1, 40), pick.choice(8, 16)
    H, causal = G * pick.integer(1, 2), pick.choice(False, True)

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        documents: torch.Tensor,
        implementation: str | None = None,
    ) -> torch.Tensor:
        return packed_attention(q, k, v, documents, causal=causal, implementation=implementation)

    return Example(
        run=run,
        exact=lambda q, k, v, documents: run(q, k, v, documents, implementation="reference"),
        tensors=(pick.normal(B, H, T, K), pick.normal(B, G, T, K), pick.normal(B, G, T, K)),
        given=(pick.integers(4, B, T).sort(1).values,),
        slack=10.0,
        products=True,
    )


TESTS = ("test_packed_attention",)
SAYS = {
    "eager": "torch's fused attention with the documents as a mask [B, 1, T, T]: the same result",
    "sdpa": "torch's fused causal attention without documents: what packing should cost at most",
}


def cases(device: str) -> Iterator[Case]:
    """Causal sequences of growing length, each of eight documents."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    B, H, K = (1, 32, 128) if device == "cuda" else (1, 4, 64)
    for T in (4096, 16384) if device == "cuda" else (1024, 4096, 8192):
        documents = (torch.arange(T, device=device) * 8 // T)[None]
        qkv = tuple(
            torch.randn(B, H, T, K, device=device, dtype=dtype, requires_grad=True)
            for _ in range(3)
        )
        mask = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
        ways = forward_backward(
            lambda q, k, v, implementation, documents=documents: packed_attention(
                q, k, v, documents, causal=True, implementation=implementation
            ),
            partial(F.scaled_dot_product_attention, attn_mask=mask),
            IMPLEMENTATIONS,
            qkv,
        )
        ways["sdpa"] = ForwardBackward(partial(F.scaled_dot_product_attention, is_causal=True), qkv)
        flops = 14.0 * B * H * K * T * T / 16
        yield Case(
            f"B={B} H={H} T={T} K={K} {dtype}", ways, flops=flops, at={"length": T}, says=SAYS
        )
