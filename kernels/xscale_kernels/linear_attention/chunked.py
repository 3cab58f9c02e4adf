"""linear_attention a chunk at a time in torch: matrix products inside a chunk, a recurrent state between chunks."""

from __future__ import annotations

import torch

from xscale_kernels.rows import wide


def _triangle(x: torch.Tensor, reverse: bool) -> torch.Tensor:
    """Zero the future in place (the past if `reverse`)."""
    return x.triu_() if reverse else x.tril_()


def _decay_(
    scores: torch.Tensor,
    gates: torch.Tensor | None,
    documents: torch.Tensor | None,
    before: torch.Tensor | None,
    reverse: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Decay the scores [N, L, L] in place.

    Returns factors of the initial state [N, L], of the keys that enter the final state [N, L], and of the state itself
    [N]; None stands for 1.

    gates [N, L]: log decays. documents [N, L]; before [N]: documents of the initial state.
    """
    lead = keep = fade = None
    edge = 0 if reverse else -1
    if gates is not None:
        sums = gates.flip(-1).cumsum(-1).flip(-1) if reverse else gates.cumsum(-1)
        scores.mul_(_triangle(sums[..., :, None] - sums[..., None, :], reverse).exp_())
        lead, keep, fade = sums.exp(), (sums[..., edge, None] - sums).exp(), sums[..., edge].exp()
    if documents is not None and before is not None:
        scores.mul_(documents[..., :, None] == documents[..., None, :])
        same, last = documents == before[..., None], documents == documents[..., edge, None]
        lead = same.to(scores.dtype) if lead is None else lead * same
        keep = last.to(scores.dtype) if keep is None else keep * last
        fade = same[..., edge].to(scores.dtype) if fade is None else fade * same[..., edge]
    return lead, keep, fade


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor | None,
    documents: torch.Tensor | None,
    before: torch.Tensor | None,
    state: torch.Tensor,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one chunk: the output [N, L, M] and the state [N, K, M] after it."""
    scores = _triangle(torch.bmm(q, k.transpose(1, 2)), reverse)  # [N, L, L]
    lead, keep, fade = _decay_(scores, gates, documents, before, reverse)
    out = torch.bmm(scores, v)
    out.baddbmm_(q if lead is None else q * lead[:, :, None], state)
    rows = k if keep is None else k * keep[:, :, None]
    after = state if fade is None else state * fade[:, None, None]
    return out, torch.baddbmm(after, rows.transpose(1, 2), v)


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor | None,
    documents: torch.Tensor | None,
    state: torch.Tensor | None,
    reverse: bool,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunked `reference_linear_attention`; `reverse` scans from the last token to the first, for the gradients."""
    (B, H, T, K), M = q.shape, v.shape[3]
    compute = wide(q.dtype)
    out = v.new_empty(B, H, T, M)
    if reverse and log_decay is not None:
        # In reverse, the state decays by the next token's gate; the last token has none.
        log_decay = torch.cat((log_decay[..., 1:], torch.zeros_like(log_decay[..., :1])), -1)
    q, k, v = (tensor.reshape(B * H, T, tensor.shape[3]) for tensor in (q, k, v))
    gates = None if log_decay is None else log_decay.reshape(B * H, T).to(compute)
    places = None if documents is None else documents.repeat_interleave(H, 0)  # [B * H, T]
    carry = (
        q.new_zeros(B * H, K, M, dtype=compute)
        if state is None
        else state.reshape(B * H, K, M).to(compute)
    )
    result, starts = out.view(B * H, T, M), range(0, T, chunk)
    for start in reversed(starts) if reverse else starts:
        span = slice(start, min(start + chunk, T))
        edge = min(span.stop, T - 1) if reverse else max(start - 1, 0)
        result[:, span], carry = _chunk(
            q[:, span].to(compute),
            k[:, span].to(compute),
            v[:, span].to(compute),
            None if gates is None else gates[:, span],
            None if places is None else places[:, span],
            None if places is None else places[:, edge],
            carry,
            reverse,
        )
    # Without tokens the carry aliases the input state, which a custom operator must not return.
    return out, carry.view(B, H, K, M) if T else carry.view(B, H, K, M).clone()
