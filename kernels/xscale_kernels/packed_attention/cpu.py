"""packed_attention by torch's fused CPU kernel, a block of queries at a time, with the keys that any of them sees."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from xscale_kernels import torch_private

BLOCK = 256
"""Queries of a block. Its mask has as many rows, and as many columns as there are keys to see."""


def _blocks(
    documents: Tensor, causal: bool, like: Tensor
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield queries, keys and mask of each block of one sequence with documents [T].

    The mask [queries, keys] is added to the scores; None where it hides nothing.
    """
    for start in range(0, len(documents), BLOCK):
        queries = slice(start, min(start + BLOCK, len(documents)))
        end = queries.stop if causal else len(documents)
        seen = documents[queries, None] == documents[:end]
        seen = seen.tril_(start) if causal else seen
        visible = seen.any(0).nonzero()
        keys = slice(int(visible[0]), int(visible[-1]) + 1)
        hidden = ~seen[:, keys]
        mask = (
            like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
            if bool(hidden.any())
            else None
        )
        yield queries, keys, mask


def _aligned(x: Tensor) -> Tensor:
    """Copy x unless the channels of a head are adjacent, as the fused kernel takes them to be."""
    return x if x.stride(-1) == 1 else x.contiguous()


def forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, K] and log-sum-exp of the scores [B, H, T]."""
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    for b in range(len(q)):
        row = slice(b, b + 1)
        for queries, keys, mask in _blocks(documents[b], causal, q):
            out[row, :, queries], lse[row, :, queries] = torch_private.cpu_flash_attention(
                q[row, :, queries], k[row, :, keys], v[row, :, keys], mask
            )
    return out, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    documents: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; those of k and v are summed over blocks in float32 at least."""
    q, k, v, dout = _aligned(q), _aligned(k), _aligned(v), _aligned(dout)
    to_q, compute = q.new_empty(q.shape), lse.dtype
    to_k, to_v = (x.new_zeros(x.shape, dtype=compute) for x in (k, v))
    for b in range(len(q)):
        row = slice(b, b + 1)
        for queries, keys, mask in _blocks(documents[b], causal, q):
            part = (row, slice(None), queries)
            to_q[part], some_k, some_v = torch_private.cpu_flash_attention_backward(
                dout[part],
                q[part],
                k[row, :, keys],
                v[row, :, keys],
                out[part],
                lse[part].contiguous(),
                mask,
            )
            to_k[row, :, keys] += some_k
            to_v[row, :, keys] += some_v
    return to_q, to_k.to(k.dtype), to_v.to(v.dtype)
