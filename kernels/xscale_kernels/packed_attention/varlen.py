"""packed_attention as an operator that torch.compile keeps in its graphs, by FlashAttention (Dao 2023) within torch.

All its tensors have fixed shapes: offsets that are padded to the number of tokens, and on the CPU the number of
documents and the length of the longest, which the operator reads when it runs. So one graph serves all micro-batches,
no empty document is launched, and the host waits for nothing. On a CPU it attends a document at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from xscale_kernels import torch_private
from xscale_kernels.packed_attention.spans import DocumentSpans
from xscale_kernels.rows import wide

WHOLE = (-1, -1)
CAUSAL = (-1, 0)
"""Tokens before and behind a query that it sees; -1: all."""


@torch.library.custom_op("xscale::varlen_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, sizes: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """Output [N, H, K] and log-sum-exp of the scores [H, N], of q [N, H, K], k and v [N, G, K], N tokens in a row."""
    count, longest = sizes.tolist()
    if q.is_cuda:
        cut, window = offsets[: count + 1], CAUSAL if causal else WHOLE
        return torch_private.flash_varlen(q, k, v, cut, longest, window)
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[1], len(q), dtype=wide(q.dtype))
    for rows in _documents(offsets, count):
        queries, keys, values = (_as_sequence(x[rows]) for x in (q, k, v))
        mask = _future(q, rows) if causal else None
        attended, normaliser = torch_private.cpu_flash_attention(queries, keys, values, mask)
        out[rows], lse[:, rows] = attended[0].transpose(0, 1), normaliser[0]
    return out, lse


@_forward.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32 if q.is_cuda else wide(q.dtype))
    return q.new_empty(q.shape), lse


@torch.library.custom_op("xscale::varlen_attention_backward", mutates_args=())
def _back(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    offsets: Tensor,
    sizes: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    count, longest = sizes.tolist()
    if q.is_cuda:
        cut, window = offsets[: count + 1], CAUSAL if causal else WHOLE
        return torch_private.flash_varlen_backward(
            dout.contiguous(), q, k, v, out, lse, cut, longest, window
        )
    gradients = tuple(x.new_empty(x.shape) for x in (q, k, v))
    for rows in _documents(offsets, count):
        above, queries, keys, values, attended = (
            _as_sequence(x[rows]) for x in (dout, q, k, v, out)
        )
        mask, normaliser = _future(q, rows) if causal else None, lse[None, :, rows].contiguous()
        of_document = torch_private.cpu_flash_attention_backward(
            above, queries, keys, values, attended, normaliser, mask
        )
        for gradient, part in zip(gradients, of_document, strict=True):
            gradient[rows] = part[0].transpose(0, 1)
    return gradients[0], gradients[1], gradients[2]


@_back.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _documents(offsets: Tensor, count: int) -> Iterator[slice]:
    return (slice(start, end) for start, end in pairwise(offsets[: count + 1].tolist()))


def _as_sequence(rows: Tensor) -> Tensor:
    """Rows [n, H, K] of a document as [1, H, n, K]."""
    return rows.transpose(0, 1)[None].contiguous()


def _future(q: Tensor, rows: slice) -> Tensor:
    """Return the mask [n, n] that is added to the scores of a document: -inf for later keys."""
    length = rows.stop - rows.start
    return q.new_full((length, length), float("-inf")).triu_(1)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, offsets, sizes, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output, offsets, sizes)


def _backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, offsets, sizes = ctx.saved_tensors
    return *_back(q, k, v, out, lse, dout, offsets, sizes, ctx.causal), None, None, None


_forward.register_autograd(_backward, setup_context=_keep)


def _pairs(q: Any, causal: bool) -> int:
    """Pairs of a query and a key if all tokens are of one document: where documents end is not known here."""
    N, H, _ = q
    return int(H * N * (N + 1) // 2 if causal else H * N * N)


@register_flop_formula(torch.ops.xscale.varlen_attention)
def _forward_flops(
    q: Any, k: Any, v: Any, offsets: Any, sizes: Any, causal: bool, *_: Any, **__: Any
) -> int:
    return 4 * _pairs(q, causal) * int(q[2])


@register_flop_formula(torch.ops.xscale.varlen_attention_backward)
def _backward_flops(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    offsets: Any,
    sizes: Any,
    causal: bool,
    *_: Any,
    **__: Any,
) -> int:
    return 10 * _pairs(q, causal) * int(q[2])


def attend(q: Tensor, k: Tensor, v: Tensor, spans: DocumentSpans, causal: bool) -> Tensor:
    """Output [B, H, T, K] of q [B, H, T, K], k and v [B, G, T, K]; `spans` are on their device."""
    shape = q.transpose(1, 2).shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [B * T, H or G, K]
    if spans.order is not None:
        q, k, v = (x.index_select(0, spans.order) for x in (q, k, v))
    out: Tensor = _forward(
        q.contiguous(), k.contiguous(), v.contiguous(), spans.offsets, spans.sizes, causal
    )[0]
    if spans.order is not None:
        out = torch.empty_like(out).index_copy(0, spans.order, out)
    return out.view(shape).transpose(1, 2)
