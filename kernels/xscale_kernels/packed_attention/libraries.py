"""packed_attention by flash-attn (Dao 2023; Shah et al. 2024), or by torch's copy of it, on sequences of any length.

They see the B * T tokens of all sequences in one row, cut into documents. They differentiate themselves, so that
`packed_attention` calls `attend` outside of its torch.library operator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from xscale_kernels.packed_attention.spans import DocumentSpans

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, bool], Tensor]
"""(q [N, H, K], k and v [N, G, K], offsets, longest document, causal) -> [N, H, K]."""


def _flash_attn_3(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, causal: bool
) -> Tensor:
    from flash_attn_interface import flash_attn_varlen_func

    deterministic = torch.are_deterministic_algorithms_enabled()
    out = flash_attn_varlen_func(
        q, k, v, offsets, offsets, longest, longest, causal=causal, deterministic=deterministic
    )
    # Its first versions return the log-sum-exp too.
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


def _flash_attn(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, causal: bool
) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    deterministic = torch.are_deterministic_algorithms_enabled()
    result: Tensor = flash_attn_varlen_func(
        q, k, v, offsets, offsets, longest, longest, causal=causal, deterministic=deterministic
    )
    return result


def _torch(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, causal: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if causal else (-1, -1)
    # torch 2.11 takes grouped queries without a word.
    takes_word = "enable_gqa" in inspect.signature(varlen_attn).parameters
    grouped: dict[str, Any] = (
        {"enable_gqa": True} if takes_word and q.shape[1] != k.shape[1] else {}
    )
    out = varlen_attn(q, k, v, offsets, offsets, longest, longest, window_size=window, **grouped)
    assert isinstance(out, Tensor)
    return out


def _adjacent(x: Tensor) -> Tensor:
    """Copy x unless the channels of a head are adjacent, as the kernels take them to be."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _attend(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, spans: DocumentSpans, causal: bool
) -> Tensor:
    """Output [B, H, T, K] of q [B, H, T, K], k and v [B, G, T, K]; gradients are the library's."""
    spans, shape = spans.to(q.device), q.transpose(1, 2).shape
    offsets, longest = spans.cut()
    # A view where the heads of a token are adjacent, as they are after the projection.
    q, k, v = (_adjacent(x.transpose(1, 2).flatten(0, 1)) for x in (q, k, v))  # [B * T, H or G, K]
    if spans.order is None:
        return kernel(q, k, v, offsets, longest, causal).view(shape).transpose(1, 2)
    q, k, v = (x.index_select(0, spans.order) for x in (q, k, v))
    inverse = torch.empty_like(spans.order)
    inverse[spans.order] = torch.arange(len(inverse), device=inverse.device)
    out = kernel(q, k, v, offsets, longest, causal)
    return out.index_select(0, inverse).view(shape).transpose(1, 2)


flash_attn_3_attend, flash_attn_attend, torch_attend = (
    partial(_attend, kernel) for kernel in (_flash_attn_3, _flash_attn, _torch)
)
