"""Linear attention: sums of key-value products by a chunked scan (Katharopoulos et al. 2020).

The fused operator computes causal sums: masked products inside a chunk, and a state [F, K] that carries the past from
chunk to chunk. Cost is linear in the length, and no per-token state is stored.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.nn.attention.ops.dense import grouped_matmul, repeat_kv, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale_kernels.linear_attention.op import linear_attention as scan

CHUNK = 64
"""Tokens of a chunk."""


@dataclass(frozen=True)
class PriorState:
    """State of the tokens before this rank's shard of the sequence."""

    states: Callable[[Tensor], Tensor]
    """`AttentionMask.prior_state`."""
    document: Tensor | None
    """[B], document of the token before the shard."""


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    floor: float = 1e-6,
    *,
    kernel: str | None = None,
) -> Tensor:
    """sum_j (q_i . k_j) v_j / (sum_j q_i . k_j + floor) over the allowed keys.

    Features q [B, H, T, F] and k [B, G, S, F], values v [B, G, S, K] -> [B, H, T, K]. `kernel` is the implementation
    that the recipe chooses.
    """
    sums = linear_sums(q, k, F.pad(upcast(v), (0, 1), value=1.0), mask, kernel=kernel)
    return (sums[..., :-1] / (sums[..., -1:] + floor)).to(v.dtype)


def trigonometric_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    weights: Tensor,
    *,
    kernel: str | None = None,
) -> Tensor:
    """sum_j (q_i . k_j) v_j / max(sum_j q_i . k_j, sum_j w_j / F) for features whose products may be negative.

    The products estimate w_j times a number in (0, 1], by sines and cosines, so the divisor may come near to zero, or
    below; less than the share of one of F features is taken for noise. Features q [B, H, T, F] and k [B, G, S, F] with
    |q| <= 1, weights w [B, G, S, 1], values v [B, G, S, K] -> [B, H, T, K].
    """
    sums = linear_sums(q, k, F.pad(upcast(v), (0, 1), value=1.0), mask, kernel=kernel)
    most = linear_sums(torch.ones_like(q[..., :1]), weights, torch.ones_like(weights), mask)
    return (sums[..., :-1] / torch.maximum(sums[..., -1:], most / q.shape[-1])).to(v.dtype)


def linear_sums(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, kernel: str | None = None
) -> Tensor:
    """sum_j (q_i . k_j) v_j over the allowed keys: [B, H, T, K], float32 at least."""
    q = upcast(q)
    k = upcast(k)
    v = upcast(v)
    if mask.causal:
        earlier = (
            None if mask.prior_state is None else PriorState(mask.prior_state, mask.prior_document)
        )
        return _causal(q, k, v, mask.offset, mask.key_documents, kernel, earlier)
    if mask.query_documents is None:
        return grouped_matmul(q, k.mT @ v)
    assert mask.key_documents is not None
    if mask.query_documents is not mask.key_documents:
        return _sums_over_two_sequences(q, k, v, mask.query_documents, mask.key_documents)
    # Sum over the past plus sum over the future; the token itself is in both, so it is subtracted once.
    forward = _causal(q, k, v, 0, mask.key_documents, kernel)
    backward = _causal(q.flip(2), k.flip(2), v.flip(2), 0, mask.key_documents.flip(1), kernel).flip(
        2
    )
    k, v = (repeat_kv(x, q.shape[1]) for x in (k, v))
    return forward + backward - (q * k).sum(-1, keepdim=True) * v


def _sums_over_two_sequences(
    q: Tensor, k: Tensor, v: Tensor, query_documents: Tensor, key_documents: Tensor
) -> Tensor:
    """Sum over the keys of each query's document in another sequence, as in cross attention: [B, H, T, K].

    There is a state for each document; `query_documents` [B, T], `key_documents` [B, S].
    """
    sums = q.new_zeros(*q.shape[:3], v.shape[-1])
    for document in query_documents.unique():  # type: ignore[no-untyped-call]
        keys = k * (key_documents == document)[:, None, :, None]
        sums = (
            sums + grouped_matmul(q, keys.mT @ v) * (query_documents == document)[:, None, :, None]
        )
    return sums


def decayed_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_keep: Tensor,
    mask: AttentionMask,
    *,
    kernel: str | None = None,
) -> Tensor:
    """sum over j <= i of exp(d_(j+1) + ... + d_i) (q_i . k_j) v_j, causal: S_t = exp(d_t) S_(t-1) + k_t v_t^T.

    Features q [B, H, T, F], k [B, H, S, F], v [B, H, S, K], d = log_keep [B, H, S] <= 0 -> [B, H, T, K].
    """
    assert mask.causal
    # Cached tokens have no query here: pad the queries and scan from the start.
    q = F.pad(q, (0, 0, mask.offset, 0))
    documents, chunk = mask.key_documents, min(CHUNK, mask.keys)
    sums, _ = scan(
        q, k, v, log_decay=log_keep, documents=documents, chunk=chunk, implementation=kernel
    )
    return sums[:, :, mask.offset :]


def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offset: int,
    documents: Tensor | None,
    kernel: str | None,
    earlier: PriorState | None = None,
) -> Tensor:
    """q [B, H, T, F], k and v [B, G, S, ...], documents [B, S], with S = offset + T -> [B, H, T, K]."""
    heads, queries = q.shape[1:3]
    assert offset + queries == k.shape[2], "causal queries must align with the last keys"
    state, last = None, None
    if offset:
        before = k[:, :, :offset]
        if documents is not None:
            last = documents[:, offset - 1]  # [B]
            before = _last_document_keys(before, documents[:, :offset])
        state = before.mT @ v[:, :, :offset]  # [B, G, F, K]
    if earlier is not None:
        assert offset == 0, "a shard gets the past as a state, not as cached keys"
        state, last = earlier.states(_last_document_keys(k, documents).mT @ v), earlier.document
    if documents is not None:
        documents = documents[:, offset:]
        if state is not None and last is not None:
            state = state * (last == documents[:, 0])[:, None, None, None]
    k, v = (repeat_kv(x[:, :, offset:], heads) for x in (k, v))
    state = None if state is None else repeat_kv(state, heads)
    sums, _ = scan(
        q, k, v, documents=documents, state=state, chunk=min(CHUNK, queries), implementation=kernel
    )
    return sums


def _last_document_keys(keys: Tensor, documents: Tensor | None) -> Tensor:
    """Keys [B, G, S, F] of each sequence's last document, zeros for other documents."""
    return keys if documents is None else keys * (documents == documents[:, -1:])[:, None, :, None]


def scan_multiply_adds(queries: int, keys: int, features: int, width: int, causal: bool) -> float:
    """Multiply-adds of one head's `linear_sums`, including the column that sums the weights."""
    width += 1
    if not causal:
        return float((queries + keys) * features * width)
    chunk = min(CHUNK, queries)
    return float(queries * chunk * (features + width) + (queries + keys) * features * width)
