"""delta_rule (Schlag et al. 2021; decay: Yang, Kautz and Hatamizadeh 2024): a causal scan with state in and out."""

from __future__ import annotations

import torch

from xscale_kernels import refusals
from xscale_kernels.rows import wide
from xscale_kernels.select import Implementation, choose

Tensor = torch.Tensor


def reference_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    strength: Tensor,
    log_decay: Tensor | None,
    documents: Tensor | None,
    state: Tensor | None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Compute S_t = e^{d_t} (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T, o_t = q_t S_t. Shapes as in `delta_rule`."""
    B, H, T, K = q.shape
    compute = wide(q.dtype)
    rows, keys, values, strengths = (tensor.to(compute) for tensor in (q, k, v, strength))
    carry = rows.new_zeros(B, H, K, v.shape[3]) if state is None else state.to(compute)
    out = []
    for t in range(T):
        if log_decay is not None:
            carry = carry * log_decay[:, :, t, None, None].to(compute).exp()
        if documents is not None and t:
            carry = carry * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        key = keys[:, :, t, :, None]
        replaced = values[:, :, t, None, :] - (key * carry).sum(2, keepdim=True)
        carry = carry + strengths[:, :, t, None, None] * key * replaced
        out.append((rows[:, :, t, None, :] @ carry)[:, :, 0])
    result = torch.stack(out, 2) if out else v.new_zeros(B, H, 0, v.shape[3], dtype=compute)
    return result.to(v.dtype), carry.clone() if T == 0 else carry


def _fla(q: Tensor, v: Tensor, documents: Tensor | None) -> str | None:
    if q.dtype is not v.dtype or q.dtype is torch.float64:
        return "fla needs one dtype for queries and values, and it is not float64"
    if q.dtype is torch.float32 and not torch.backends.cuda.matmul.allow_tf32:
        return "fla multiplies float32 as TF32, which needs torch.backends.cuda.matmul.allow_tf32"
    if torch.compiler.is_compiling():
        return "fla's launches are no part of a compiled graph"
    if documents is not None:
        return "fla takes documents as sequences of a batch of one"
    if max(q.shape[3], v.shape[3]) > 256:
        return "keys or values are wider than 256"
    if q.dtype is not torch.float32 and (q.shape[3] % 2 or v.shape[3] % 2):
        return "fla needs even widths in half precision"
    return refusals.unless_library(q, "fla", (8, 0))


_HERE = "xscale_kernels.delta_rule"
IMPLEMENTATIONS = (
    Implementation("fla", f"{_HERE}.libraries", _fla, prefix="fla_"),
    Implementation("torch", f"{_HERE}.chunked", refusals.never),
    Implementation("reference", f"{_HERE}.op", refusals.never, prefix="reference_"),
)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    strength: Tensor,
    *,
    log_decay: Tensor | None = None,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = 64,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """o_t = q_t S_t, S_t = e^{d_t} (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T: causal, in time that grows with T.

    q, k: [B, H, T, K]; keys of length 1 keep what is read within what was written. v: [B, H, T, M]. strength: b [B, H,
    T]. log_decay: d [B, H, T], at most 0, preferably float32; None for no decay. documents: [B, T] integers; the state
    starts from zero where they change. state: [B, H, K, M], S before the first token, of the first token's document;
    None for zeros. chunk: tokens per chunk of the implementation `torch`. Returns o [B, H, T, M] of v's dtype and S
    after the last token [B, H, K, M] in float32 at least. Gradients reach all but documents.

    Raises ValueError for shapes that do not fit, UnusableError when the named implementation refuses.
    """
    if q.dim() != 4 or k.shape != q.shape or v.dim() != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"delta_rule takes q, k [B, H, T, K] and v [B, H, T, M], got {[*q.shape]}, {[*k.shape]}, {[*v.shape]}"
        )
    for name, tensor in (("strength", strength), ("log_decay", log_decay)):
        if tensor is not None and tensor.shape != q.shape[:3]:
            raise ValueError(f"{name} is [B, H, T] = {[*q.shape[:3]]}, got {[*tensor.shape]}")
    if documents is not None and documents.shape != (q.shape[0], q.shape[2]):
        raise ValueError(
            f"documents are [B, T] = {[q.shape[0], q.shape[2]]}, got {[*documents.shape]}"
        )
    tensors = (q, k, v, strength, log_decay, documents, state)
    if implementation == "reference" or q.shape[2] == 0:
        return reference_scan(*tensors)
    if torch.compiler.is_compiling() and implementation in (None, "", "torch"):
        # A graph fuses the chunks' products with what is around them, and cannot contain the other libraries' launches.
        from xscale_kernels.delta_rule.chunked import scan as traced

        return traced(*tensors, chunk)
    chosen = choose("delta_rule", IMPLEMENTATIONS, implementation, q, v, documents)
    scan = chosen.implementation.function("scan")
    result: tuple[Tensor, Tensor] = scan(*tensors, chunk)
    return result
