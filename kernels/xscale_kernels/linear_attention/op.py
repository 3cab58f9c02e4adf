"""linear_attention (Katharopoulos et al. 2020; decay: Sun et al. 2023, RetNet): a causal scan with state in and out."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from xscale_kernels import refusals, triton_runtime
from xscale_kernels.rows import wide
from xscale_kernels.select import Implementation, choose


def reference_linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor | None,
    documents: torch.Tensor | None,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """S_t = exp(g_t) [same document] S_{t-1} + k_t v_t^T and o_t = q_t S_t. Shapes as in `linear_attention`."""
    B, H, T, K = q.shape
    compute = wide(q.dtype)
    rows, keys, values = (tensor.to(compute) for tensor in (q, k, v))
    carry = rows.new_zeros(B, H, K, v.shape[3]) if state is None else state.to(compute)
    out = []
    for t in range(T):
        if log_decay is not None:
            carry = carry * log_decay[:, :, t, None, None].to(compute).exp()
        if documents is not None and t:
            carry = carry * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        carry = carry + keys[:, :, t, :, None] * values[:, :, t, None, :]
        out.append((rows[:, :, t, None, :] @ carry)[:, :, 0])
    result = torch.stack(out, 2) if out else v.new_zeros(B, H, 0, v.shape[3], dtype=compute)
    return result.to(v.dtype), carry


Tensor = torch.Tensor


def _fla(
    q: Tensor, v: Tensor, log_decay: Tensor | None, documents: Tensor | None, chunk: int
) -> str | None:
    if q.dtype is torch.float64 or v.dtype is not q.dtype:
        return "fla needs one dtype for queries and values, and it is not float64"
    if q.dtype is torch.float32 and not torch.backends.cuda.matmul.allow_tf32:
        return "fla multiplies float32 as TF32, which needs torch.backends.cuda.matmul.allow_tf32"
    if documents is not None:
        return "fla takes documents as sequences of a batch of one"
    K, M = q.shape[3], v.shape[3]
    if max(K, M) > 256:
        return "keys or values are wider than 256"
    if q.dtype is not torch.float32 and (K % 2 or M % 2):
        return "fla needs even widths in half precision"
    if log_decay is not None and refusals.is_hopper(q) and triton_runtime.version() < (3, 7, 1):
        return "fla's gradients with a decay are wrong on Hopper before Triton 3.7.1"
    return refusals.unless_library(q, "fla", (8, 0))


def _triton(
    q: Tensor, v: Tensor, log_decay: Tensor | None, documents: Tensor | None, chunk: int
) -> str | None:
    reason = refusals.unless_triton(q)
    if reason is None and q.shape[3] > 256:
        return "keys are wider than 256"
    if reason is None and chunk not in (16, 32, 64, 128):
        return f"the kernel supports chunks of 16, 32, 64 or 128, not {chunk}"
    return reason


_HERE = "xscale_kernels.linear_attention"
IMPLEMENTATIONS = (
    Implementation("fla", f"{_HERE}.libraries", _fla, prefix="fla_"),
    Implementation("triton", f"{_HERE}.triton", _triton),
    Implementation("torch", f"{_HERE}.chunked", refusals.never),
    Implementation("reference", f"{_HERE}.op", refusals.never, prefix="reference_"),
)


@torch.library.custom_op("xscale::linear_attention", mutates_args=())
def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    documents: Tensor | None,
    state: Tensor | None,
    reverse: bool,
    chunk: int,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    chosen = choose(
        "linear_attention", IMPLEMENTATIONS, implementation, q, v, log_decay, documents, chunk
    )
    scan = chosen.implementation.function("scan")
    out: tuple[Tensor, Tensor] = scan(q, k, v, log_decay, documents, state, reverse, chunk)
    return out


@_scan.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), q.new_empty(
        *q.shape[:2], q.shape[3], v.shape[3], dtype=wide(q.dtype)
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, log_decay, documents, state, ctx.reverse, ctx.chunk, ctx.implementation = inputs
    ctx.save_for_backward(
        q, k, v, log_decay, documents, state, output[1] if log_decay is not None else None
    )


def _backward(ctx: Any, dout: Tensor, dlast: Tensor) -> tuple[Any, ...]:
    """The gradients are scans too with permuted inputs: forward in time for q, reverse for k and v.

    dq_t sums (do_t v_s) k_s over s <= t; dk_s sums (v_s do_t) q_t and dv_s sums (k_s q_t) do_t over t >= s, each with
    the weight exp(g_{s+1} + ... + g_t). The gates' gradient follows: a pair's contribution to the loss is added at t
    and subtracted at s.
    """
    assert not ctx.reverse
    q, k, v, log_decay, documents, state, last = ctx.saved_tensors
    settings = (ctx.chunk, ctx.implementation)
    transposed = None if state is None else state.transpose(2, 3)
    dq, _ = _scan(dout, v, k, log_decay, documents, transposed, False, *settings)
    dk, _ = _scan(v, dout, q, log_decay, documents, dlast.transpose(2, 3), True, *settings)
    dv, dfirst = _scan(k, q, dout, log_decay, documents, dlast, True, *settings)
    dgate = dstate = None
    if log_decay is not None:
        contribution = (q.to(dlast.dtype) * dq).sum(-1) - (k.to(dlast.dtype) * dk).sum(
            -1
        )  # [B, H, T]
        contribution[..., -1] += (dlast * last).sum((-1, -2))
        dgate = contribution.flip(-1).cumsum(-1).flip(-1).to(log_decay.dtype)
        dfirst = dfirst * log_decay[..., 0, None, None].exp()
    if state is not None:
        dstate = dfirst.to(state.dtype)
    return dq, dk, dv, dgate, None, dstate, None, None, None


_scan.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.xscale.linear_attention)
def _flops(
    q: Any,
    k: Any,
    v: Any,
    gate: Any,
    documents: Any,
    state: Any,
    reverse: bool,
    chunk: int,
    *_: Any,
    **__: Any,
) -> int:
    B, H, T, K = q
    return int(B * H * T * (2 * chunk * (K + v[3]) + 4 * K * v[3]))


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = 64,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """o_t = q_t S_t with S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T: causal, in time and memory that grow with T.

    q, k: [B, H, T, K], after feature map and scale. v: [B, H, T, M]. log_decay: [B, H, T], at most 0, preferably
    float32; None for no decay. documents: [B, T] integers; the state starts from zero where they change. state: [B, H,
    K, M], S before the first token, of the first token's document; None for zeros. chunk: tokens per chunk. Returns o
    [B, H, T, M] of v's dtype and S after the last token [B, H, K, M] in float32 at least. Gradients reach all but
    documents. The normaliser of Katharopoulos et al. is this operator with a column of ones appended to v.

    Raises ValueError for shapes that do not fit, UnusableError when the named implementation refuses.
    """
    if q.dim() != 4 or k.shape != q.shape or v.dim() != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"linear_attention takes q, k [B, H, T, K] and v [B, H, T, M], got {[*q.shape]}, {[*k.shape]}, {[*v.shape]}"
        )
    if log_decay is not None and log_decay.shape != q.shape[:3]:
        raise ValueError(f"log_decay is [B, H, T] = {[*q.shape[:3]]}, got {[*log_decay.shape]}")
    if documents is not None and documents.shape != (q.shape[0], q.shape[2]):
        raise ValueError(
            f"documents are [B, T] = {[q.shape[0], q.shape[2]]}, got {[*documents.shape]}"
        )
    if implementation == "reference" or q.shape[2] == 0:
        return reference_linear_attention(q, k, v, log_decay, documents, state)
    eager = implementation in (None, "", "fla") and not torch.compiler.is_compiling()
    if eager and _fla(q, v, log_decay, documents, chunk) is None:
        # Outside of the torch.library operator autograd takes fla's own backward, in place of three more scans.
        chosen = choose(
            "linear_attention", IMPLEMENTATIONS, implementation, q, v, log_decay, documents, chunk
        )
        scan = chosen.implementation.function("scan")
        result: tuple[Tensor, Tensor] = scan(q, k, v, log_decay, documents, state, False, chunk)
        return result
    out: tuple[Tensor, Tensor] = _scan(
        q, k, v, log_decay, documents, state, False, chunk, implementation or ""
    )
    return out
