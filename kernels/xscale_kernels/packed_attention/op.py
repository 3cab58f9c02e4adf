"""packed_attention: softmax(q k^T / sqrt(K)) v (Vaswani et al. 2017, equation 1) within the documents of a sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from xscale_kernels import refusals, torch_private
from xscale_kernels.packed_attention.spans import DocumentSpans, find_document_spans
from xscale_kernels.packed_attention.varlen import attend as attend_in_graph
from xscale_kernels.rows import wide
from xscale_kernels.select import Implementation, UnusableError, choose, use_reference


def reference_forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, K] and log-sum-exp of the scores [B, H, T], through all scores."""
    weights, scores, values = _reference_weights(q, k, v, documents, causal)
    return (weights @ values).to(q.dtype), scores.logsumexp(-1)


def reference_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    documents: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        weights, _, values = _reference_weights(q, k, v, documents, causal)
        mixed = (weights @ values).to(q.dtype)
    to_q, to_k, to_v = torch.autograd.grad(mixed, (q, k, v), dout)
    return to_q, to_k, to_v


def _reference_weights(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and scores [B, H, T, T], and the values of each head [B, H, T, K]."""
    compute, share = wide(q.dtype), q.shape[1] // k.shape[1]
    keys, values = (x.to(compute).repeat_interleave(share, 1) for x in (k, v))
    scores = q.to(compute) @ keys.mT * q.shape[3] ** -0.5
    seen = documents[:, None, :, None] == documents[:, None, None, :]
    seen = seen.tril() if causal else seen
    scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1), scores, values


def _cpu(q: Tensor, k: Tensor, v: Tensor, *_: object) -> str | None:
    reason = refusals.unless_cpu(q)
    if reason is None and v.shape[3] != q.shape[3]:
        return "torch's fused attention takes values as wide as the keys"
    if reason is None and not q.numel():
        return "torch's fused attention takes no empty tensors"
    return reason


def _takes_varlen(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Refuse what no kernel for sequences of any length takes, whoever made it."""
    if any(
        x.dtype is not q.dtype or x.dtype not in (torch.bfloat16, torch.float16) for x in (q, k, v)
    ):
        return "it takes bfloat16 or float16, the same for queries, keys and values"
    if v.shape[3] != q.shape[3]:
        return "it takes values as wide as the keys"
    if q.shape[3] % 8 or q.shape[3] > 256:
        return f"it takes heads of a multiple of 8 channels up to 256, these have {q.shape[3]}"
    return None if q.numel() else "it takes no empty tensors"


def _flash_attn_3(q: Tensor, k: Tensor, v: Tensor, *_: object) -> str | None:
    reason = _takes_varlen(q, k, v) or refusals.unless_library(q, "flash_attn_interface", (9, 0))
    return reason or (
        None if refusals.is_hopper(q) else "FlashAttention-3 needs a GPU of compute capability 9.x"
    )


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, *_: object) -> str | None:
    return _takes_varlen(q, k, v) or refusals.unless_library(q, "flash_attn_2_cuda", (8, 0))


def _torch(q: Tensor, k: Tensor, v: Tensor, *_: object) -> str | None:
    return _takes_varlen(q, k, v) or refusals.unless_library(q, "torch.nn.attention.varlen", (8, 0))


_HERE = "xscale_kernels.packed_attention"
LIBRARIES = ("flash_attn_3", "flash_attn", "torch")
"""Implementations that differentiate themselves, for a GPU."""
COMPILED = "torch"
"""The one of them that torch.compile keeps in its graphs, by the operator of `varlen`."""
IMPLEMENTATIONS = (
    Implementation("flash_attn_3", f"{_HERE}.libraries", _flash_attn_3, prefix="flash_attn_3_"),
    Implementation("flash_attn", f"{_HERE}.libraries", _flash_attn, prefix="flash_attn_"),
    Implementation("torch", f"{_HERE}.libraries", _torch, prefix="torch_"),
    Implementation("cpu", f"{_HERE}.cpu", _cpu),
    Implementation("reference", f"{_HERE}.op", refusals.never, prefix="reference_"),
)
IN_OPERATOR = IMPLEMENTATIONS[len(LIBRARIES) :]
"""Those that the torch.library operator runs."""


@torch.library.custom_op("xscale::packed_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, causal: bool, implementation: str
) -> tuple[Tensor, Tensor]:
    choice = choose("packed_attention", IN_OPERATOR, implementation, q, k, v)
    out: tuple[Tensor, Tensor] = choice.implementation.function("forward")(
        q, k, v, documents, causal
    )
    return out


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=wide(q.dtype))


@torch.library.custom_op("xscale::packed_attention_backward", mutates_args=())
def _back(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    documents: Tensor,
    causal: bool,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    choice = choose("packed_attention (backward)", IN_OPERATOR, implementation, q, k, v)
    gradients: tuple[Tensor, Tensor, Tensor]
    gradients = choice.implementation.function("backward")(
        q, k, v, out, lse, dout, documents, causal
    )
    return gradients


@_back.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, documents)


def _backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, documents = ctx.saved_tensors
    return *_back(q, k, v, out, lse, dout, documents, *ctx.settings), None, None, None


_forward.register_autograd(_backward, setup_context=_keep)


def _pairs(q: Any, causal: bool) -> int:
    """Pairs of a query and a key if all tokens are of one document: where documents end is not known here."""
    B, H, T, _ = q
    return int(B * H * T * (T + 1) // 2 if causal else B * H * T * T)


@register_flop_formula(torch.ops.xscale.packed_attention)
def _forward_flops(q: Any, k: Any, v: Any, documents: Any, causal: bool, *_: Any, **__: Any) -> int:
    return 2 * _pairs(q, causal) * int(q[3] + v[3])


@register_flop_formula(torch.ops.xscale.packed_attention_backward)
def _backward_flops(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    documents: Any,
    causal: bool,
    *_: Any,
    **__: Any,
) -> int:
    return 2 * _pairs(q, causal) * int(3 * q[3] + 2 * v[3])


def library_refusals(q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[str, str], ...] | None:
    """Name and reason of each of LIBRARIES, if all refuse; None if one of them can run the call."""
    refused = []
    for entry in IMPLEMENTATIONS[: len(LIBRARIES)]:
        reason = entry.refusal(False, q, k, v)
        if reason is None:
            return None
        refused.append((entry.name, reason))
    return tuple(refused)


@torch_private.constant_in_graphs
def _major_capability() -> int:
    """First number of the current GPU's compute capability; 0 without one."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0


def runs_compiled(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `COMPILED` can run this call in a graph of torch.compile, which traces this question."""
    return q.is_cuda and _takes_varlen(q, k, v) is None and _major_capability() >= 8


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor,
    *,
    causal: bool,
    implementation: str | None = None,
    spans: DocumentSpans | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(K)) v, where a token sees the tokens of its own document only.

    q: [B, H, T, K]. k: [B, G, T, K]. v: [B, G, T, M]; H is a multiple of G, and each kv head is shared by H / G
    consecutive query heads. documents: [B, T] int, equal for the tokens of a document. causal: a token sees no later
    ones. spans: those of `documents`, on their device, for implementations that take them; None: they are found if need
    be, for which the host waits for a GPU. Returns [B, H, T, M]. Gradients reach q, k and v.

    Raises ValueError for shapes that do not fit, UnusableError when the named implementation refuses.
    """
    fits = (
        q.dim() == 4
        and k.shape[0::2] == v.shape[0::2] == q.shape[0::2]
        and k.shape[1] == v.shape[1]
    )
    if not fits or k.shape[3] != q.shape[3] or documents.shape != (q.shape[0], q.shape[2]):
        raise ValueError(
            "packed_attention takes q [B, H, T, K], k [B, G, T, K], v [B, G, T, M] and documents [B, T], got "
            f"{[*q.shape]}, {[*k.shape]}, {[*v.shape]} and {[*documents.shape]}"
        )
    if q.shape[1] % max(k.shape[1], 1):
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} kv_heads")
    if use_reference(implementation):
        return reference_forward(q, k, v, documents, causal)[0]
    is_library = implementation in LIBRARIES
    if is_library and torch.compiler.is_compiling():
        if implementation != COMPILED or spans is None:
            reason = f"torch.compile keeps '{COMPILED}' in its graphs, where the spans of the documents are given"
            raise UnusableError(
                f"packed_attention: implementation '{implementation}' cannot run this call: {reason}"
            )
        return attend_in_graph(q, k, v, spans, causal)
    if is_library or (q.is_cuda and not implementation):
        choice = choose("packed_attention", IMPLEMENTATIONS, implementation, q, k, v)
        if choice.implementation.name in LIBRARIES:
            # Outside of the torch.library operator autograd takes the library's own backward.
            attend = choice.implementation.function("attend")
            attended: Tensor = attend(
                q, k, v, find_document_spans(documents) if spans is None else spans, causal
            )
            return attended
    out: Tensor = _forward(q, k, v, documents, causal, implementation or "")[0]
    return out
