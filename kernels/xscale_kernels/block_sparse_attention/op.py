"""block_sparse_attention (Child et al. 2019; kernels after Dao 2023): softmax attention over the blocks of a layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from xscale_kernels import refusals
from xscale_kernels.attention_sinks import add_sinks, gradient_of_sinks
from xscale_kernels.block_sparse_attention.layout import BlockLayout
from xscale_kernels.block_sparse_attention.shared_memory import limit_of, shared_bytes, stages
from xscale_kernels.rows import wide
from xscale_kernels.select import Implementation, choose


@dataclass(frozen=True)
class ScoreModifier:
    """Score modification: cap(scale * q k) - slope * |distance|, masked by causal order and by document."""

    scale: float
    """Multiplies q k."""
    causal: bool
    """Query t sees keys up to t + S - T: the last query is at the last key."""
    softcap: float = 0.0
    """Above 0, scores are squashed to softcap * tanh(score / softcap)."""
    slopes: torch.Tensor | None = None
    """[H] float32: ALiBi (Press et al. 2021)."""
    query_documents: torch.Tensor | None = None
    """[B, T] int: a query sees keys of its own document only."""
    key_documents: torch.Tensor | None = None
    """[B, S] int."""


def visible(
    q: torch.Tensor, k: torch.Tensor, layout: BlockLayout, rule: ScoreModifier
) -> torch.Tensor:
    """Mask [B or 1, L, T, S] bool of the keys that each query sees."""
    T, S = q.shape[2], k.shape[2]
    blocks = layout.mask().repeat_interleave(layout.block, 1).repeat_interleave(layout.block, 2)
    seen = blocks[None, :, :T, :S]
    query, key = torch.arange(T, device=q.device), torch.arange(S, device=q.device)
    if rule.causal:
        seen = seen & (key[None, :] <= query[:, None] + S - T)
    if rule.query_documents is not None and rule.key_documents is not None:
        seen = seen & (
            rule.query_documents[:, None, :, None] == rule.key_documents[:, None, None, :]
        )
    return seen


def reference_block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: BlockLayout,
    rule: ScoreModifier,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, H, T, M]; a query that sees no key gives zeros. Shapes as in `block_sparse_attention`."""
    H, G, T, S = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    compute = wide(q.dtype)
    keys, values = (tensor.to(compute).repeat_interleave(H // G, 1) for tensor in (k, v))
    scores = q.to(compute) @ keys.transpose(2, 3) * rule.scale  # [B, H, T, S]
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if rule.slopes is not None:
        query, key = torch.arange(T, device=q.device), torch.arange(S, device=q.device)
        distance = (query[:, None] + S - T - key[None, :]).abs()
        scores = scores - rule.slopes.to(compute)[:, None, None] * distance
    seen = visible(q, k, layout, rule)
    scores = scores.masked_fill(~seen, float("-inf"))
    # The softmax of a row of -inf is NaN; such rows get finite scores first and zero weights after.
    empty = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    if sinks is not None:
        column = sinks.to(compute)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., :S].masked_fill(~seen, 0.0)
    return (weights @ values).to(q.dtype)


Tensor = torch.Tensor
TRITON_BLOCKS = (16, 32, 64, 128)


def _triton(q: Tensor, v: Tensor, layout: BlockLayout) -> str | None:
    reason = refusals.unless_triton(q)
    if reason is None and layout.block not in TRITON_BLOCKS:
        return f"the kernel supports blocks of {', '.join(map(str, TRITON_BLOCKS))}, not {layout.block}"
    if reason is None and max(q.shape[3], v.shape[3]) > 256:
        return "heads are wider than 256"
    if reason is None and max(*q.stride(), *v.stride()) * max(layout.block, 256) >= 2**31:
        return "the strides are so large that offsets inside a block pass 2^31"
    return reason or _too_large(q, v, layout.block)


def _too_large(q: Tensor, v: Tensor, block: int) -> str | None:
    """Return the reason why the tiles do not fit into the shared memory of q's device, or None."""
    K, M = (max(16, 1 << (width - 1).bit_length()) for width in (q.shape[3], v.shape[3]))
    limit = limit_of(q.device)
    if stages(block, K, M, q.element_size(), limit):
        return None
    needed = shared_bytes(block, K, M, q.element_size(), stages=1)
    what = f"blocks of {block} with heads {max(K, M)} wide in {str(q.dtype).removeprefix('torch.')}"
    return f"{what} need {needed} bytes of shared memory, and a program has {limit}; use smaller blocks"


_HERE = "xscale_kernels.block_sparse_attention"
IMPLEMENTATIONS = (
    Implementation("cpu", f"{_HERE}.cpu", refusals.unless_cpu),
    Implementation("triton", f"{_HERE}.triton", _triton),
    Implementation("reference", f"{_HERE}.op", refusals.never, prefix="reference_"),
)


@torch.library.custom_op("xscale::block_sparse_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    query_documents: Tensor | None,
    key_documents: Tensor | None,
    sinks: Tensor | None,
    lists: list[Tensor],
    numbers: list[int],
    scale: float,
    causal: bool,
    softcap: float,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    rule, layout = (
        ScoreModifier(scale, causal, softcap, slopes, query_documents, key_documents),
        BlockLayout.from_parts(lists, numbers),
    )
    choice = choose("block_sparse_attention", IMPLEMENTATIONS, implementation, q, v, layout)
    out: Tensor
    lse: Tensor
    out, lse = choice.implementation.function("forward")(q, k, v, layout, rule)
    return (
        (out, lse)
        if sinks is None
        else add_sinks(out, lse, sinks, choice.implementation.function("LSE_UNIT"))
    )


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    compute = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=compute)


@torch.library.custom_op("xscale::block_sparse_attention_backward", mutates_args=())
def _back(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    slopes: Tensor | None,
    query_documents: Tensor | None,
    key_documents: Tensor | None,
    sinks: Tensor | None,
    lists: list[Tensor],
    numbers: list[int],
    scale: float,
    causal: bool,
    softcap: float,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rule, layout = (
        ScoreModifier(scale, causal, softcap, slopes, query_documents, key_documents),
        BlockLayout.from_parts(lists, numbers),
    )
    choice = choose(
        "block_sparse_attention (backward)", IMPLEMENTATIONS, implementation, q, v, layout
    )
    dq, dk, dv = choice.implementation.function("backward")(q, k, v, out, lse, dout, layout, rule)
    if sinks is None:
        return dq, dk, dv, lse.new_empty(0)
    return (
        dq,
        dk,
        dv,
        gradient_of_sinks(sinks, dout, out, lse, choice.implementation.function("LSE_UNIT")),
    )


@_back.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    slopes: Tensor | None,
    query_documents: Tensor | None,
    key_documents: Tensor | None,
    sinks: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    to_sinks = lse.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), to_sinks


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, slopes, query_documents, key_documents, sinks, lists, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, slopes, query_documents, key_documents, sinks, *lists)


def _backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, slopes, query_documents, key_documents, sinks, *lists = ctx.saved_tensors
    *gradients, to_sinks = _back(
        q, k, v, out, lse, dout, slopes, query_documents, key_documents, sinks, lists, *ctx.settings
    )
    of_sinks = None if sinks is None else to_sinks
    # The lists are one argument, whose gradients are a list.
    return *gradients, None, None, None, of_sinks, [None] * len(lists), None, None, None, None, None


_forward.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.xscale.block_sparse_attention)
def _forward_flops(
    q: Any,
    k: Any,
    v: Any,
    slopes: Any,
    qd: Any,
    kd: Any,
    sinks: Any,
    lists: Any,
    numbers: Any,
    *_: Any,
    **__: Any,
) -> int:
    block, heads = numbers[0], numbers[1]
    blocks = lists[1][0] * (1 if heads > 1 else q[1])
    return int(2 * q[0] * blocks * block * block * (q[3] + v[3]))


@register_flop_formula(torch.ops.xscale.block_sparse_attention_backward)
def _backward_flops(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    slopes: Any,
    qd: Any,
    kd: Any,
    sinks: Any,
    lists: Any,
    numbers: Any,
    *_: Any,
    **__: Any,
) -> int:
    block, heads = numbers[0], numbers[1]
    blocks = lists[1][0] * (1 if heads > 1 else q[1])
    return int(2 * q[0] * blocks * block * block * (4 * q[3] + 3 * v[3]))


def _fits(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout) -> None:
    if (
        q.dim() != 4
        or k.shape != (q.shape[0], k.shape[1], k.shape[2], q.shape[3])
        or v.shape[:3] != k.shape[:3]
    ):
        raise ValueError(
            "block_sparse_attention takes q [B, H, T, K], k [B, G, S, K], v [B, G, S, M], got "
            f"{[*q.shape]}, {[*k.shape]}, {[*v.shape]}"
        )
    if q.shape[1] % max(k.shape[1], 1):
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} kv_heads")
    rows, columns = -(-q.shape[2] // layout.block), -(-k.shape[2] // layout.block)
    if (layout.rows, layout.columns) != (rows, columns) or layout.heads not in (1, q.shape[1]):
        raise ValueError(
            f"these lengths need a layout of [1 or {q.shape[1]}, {rows}, {columns}] blocks, this one is "
            f"[{layout.heads}, {layout.rows}, {layout.columns}]"
        )


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    query_documents: Tensor | None = None,
    key_documents: Tensor | None = None,
    sinks: Tensor | None = None,
    implementation: str | None = None,
) -> Tensor:
    """softmax(cap(scale * q k) - slopes * distance) v over the key blocks that each query block sees.

    q: [B, H, T, K]. k: [B, G, S, K]. v: [B, G, S, M]; H is a multiple of G, and each kv head is shared by H / G
    consecutive query heads. layout: for these lengths, made once (layout_from_mask). causal: query t sees keys up to t
    + S - T, within a block too. scale: 1 / sqrt(K) when None. slopes: [H], ALiBi, no gradient. query_documents [B, T]
    and key_documents [B, S]: int, attention is within a document. sinks: [H], a logit of each head in the softmax's
    denominator (`attention_sinks`), with a gradient. Returns [B, H, T, M]; a query that sees no key gives zeros.
    Strided inputs are not copied. Gradients of q, k, v and sinks are deterministic.

    Raises ValueError for shapes that do not fit, UnusableError when the named implementation refuses.
    """
    _fits(q, k, v, layout)
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks have a logit for each of {q.shape[1]} heads, got {[*sinks.shape]}")
    if (query_documents is None) != (key_documents is None):
        raise ValueError("give documents for both queries and keys, or for neither")
    rule = ScoreModifier(
        q.shape[3] ** -0.5 if scale is None else scale,
        causal,
        softcap or 0.0,
        None if slopes is None else slopes.detach().to(torch.promote_types(q.dtype, torch.float32)),
        None if query_documents is None else query_documents.to(torch.int32).contiguous(),
        None if key_documents is None else key_documents.to(torch.int32).contiguous(),
    )
    if implementation == "reference":
        return reference_block_sparse_attention(q, k, v, layout, rule, sinks)
    out: Tensor = _forward(
        q,
        k,
        v,
        rule.slopes,
        rule.query_documents,
        rule.key_documents,
        sinks,
        layout.tensors(),
        layout.sizes(),
        rule.scale,
        causal,
        rule.softcap,
        implementation or "",
    )[0]
    return out
