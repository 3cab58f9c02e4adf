"""Linear attention whose key features are given by their logarithms, so that no sum of them over- or underflows.

Features are taken relative to a maximum, which cancels in the quotient: over the keys of the document where all of them
are seen, and over those so far in causal models, whose state fades when the maximum rises.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.nn.attention.ops.chunked_scan import CHUNK, linear_sums
from xscale.nn.attention.ops.dense import repeat_kv, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale_kernels.linear_attention.op import linear_attention as scan


def log_feature_attention(
    q: Tensor, log_k: Tensor, v: Tensor, mask: AttentionMask, *, kernel: str | None = None
) -> Tensor:
    """sum_j (q_i . exp(l_j)) v_j / sum_j q_i . exp(l_j) over the allowed keys.

    Features q [B, H, T, F], all above 0, log features l [B, G, S, F], values v [B, G, S, K] -> [B, H, T, K].
    """
    sums, _ = log_feature_sums(q, log_k, F.pad(upcast(v), (0, 1), value=1.0), mask, kernel=kernel)
    return (sums[..., :-1] / sums[..., -1:]).to(v.dtype)


def log_feature_sums(
    q: Tensor, log_k: Tensor, v: Tensor, mask: AttentionMask, *, kernel: str | None = None
) -> tuple[Tensor, Tensor]:
    """sum_j (q_i . exp(l_j - m_i)) v_j over the allowed keys [B, H, T, K], and the maxima m at all keys [B, G, S or 1].

    Arguments as in `log_feature_attention`; m is constant or rises along a document.
    """
    highest = log_k.detach().amax(-1)  # [B, G, S]
    if mask.causal:
        return _causal_sums(q, log_k, v, highest, mask, kernel)
    highest = _document_maximum(highest, mask.key_documents)
    return linear_sums(q, (log_k - highest[..., None]).exp(), v, mask, kernel=kernel), highest


def _causal_sums(
    q: Tensor, log_k: Tensor, v: Tensor, highest: Tensor, mask: AttentionMask, kernel: str | None
) -> tuple[Tensor, Tensor]:
    heads, documents = q.shape[1], mask.key_documents
    running = _running_maximum(highest, documents)  # [B, G, S]
    before = running[..., :1]
    state: Tensor | None = None
    if mask.prior_state is not None:
        last = (log_k - running[..., -1:, None]).exp()
        if documents is not None:
            last = last * (documents == documents[:, -1:])[:, None, :, None]
        # Shards add up states without a common maximum, for which the range of double precision is wide enough.
        absolute = (last.mT @ v).double() * running[..., -1:, None].double().exp()
        state = mask.prior_state(absolute)  # [B, G, F, K + 1]
        if documents is not None and mask.prior_document is not None:
            state = state * (mask.prior_document == documents[:, 0])[:, None, None, None]
        largest = state.detach()[..., -1].amax(-1, keepdim=True)  # [B, G, 1]
        before = torch.where(largest > 0, largest.log(), before.double())
        state = (state * (-before[..., None]).exp()).to(v.dtype)
        before = before.to(running.dtype)
        above = torch.maximum(running, before)
        if documents is not None:
            above = torch.where((documents == documents[:, :1])[:, None], above, running)
        running = above
    fade = torch.cat((before, running[..., :-1]), -1) - running
    if documents is not None:
        # The maximum of a document begins anew, and its first token gets no state.
        fade = fade.clamp(max=0.0)
    relative = (log_k - running[..., None]).exp()
    keys, values, fade = (repeat_kv(x, heads) for x in (relative, v, fade))
    state = None if state is None else repeat_kv(state, heads)
    # Cached tokens have no query here: pad the queries and scan from the start.
    rows = F.pad(q, (0, 0, mask.offset, 0))
    chunk = min(CHUNK, mask.keys)
    sums, _ = scan(
        rows,
        keys,
        values,
        log_decay=fade,
        documents=documents,
        state=state,
        chunk=chunk,
        implementation=kernel,
    )
    return sums[:, :, mask.offset :], running


def _running_maximum(x: Tensor, documents: Tensor | None) -> Tensor:
    """Maximum of x [B, G, S] over the tokens of the document so far."""
    if documents is None:
        return x.cummax(-1).values
    # Documents are lifted above all earlier ones by more than the numbers differ; double precision keeps their digits.
    begins = F.pad((documents[:, 1:] != documents[:, :-1]).long(), (1, 0)).cumsum(1)[
        :, None
    ]  # [B, 1, S]
    lift = begins * (2 * x.double().abs().amax() + 1)
    return ((x + lift).cummax(-1).values - lift).to(x.dtype)


def _document_maximum(x: Tensor, documents: Tensor | None) -> Tensor:
    """Maximum of x [B, G, S] over the document of each token."""
    if documents is None:
        return x.amax(-1, keepdim=True)
    return torch.maximum(
        _running_maximum(x, documents), _running_maximum(x.flip(-1), documents.flip(-1)).flip(-1)
    )
