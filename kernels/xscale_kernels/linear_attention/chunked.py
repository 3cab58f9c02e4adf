"""linear_attention a chunk at a time in torch: products inside a chunk, one state from chunk to chunk."""

from __future__ import annotations

import torch

from xscale_kernels.rows import wide


def _triangle(x: torch.Tensor, reverse: bool) -> torch.Tensor:
    """In place: what a token may not see is 0."""
    return x.triu_() if reverse else x.tril_()


def _faded(
    scores: torch.Tensor,
    gates: torch.Tensor | None,
    documents: torch.Tensor | None,
    before: torch.Tensor | None,
    reverse: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Weighs scores [N, L, L] in place; the shares of the state that comes in [N, L], of the keys that it keeps [N, L]
    and of itself that goes on [N]; None for all of it.

    gates [N, L]: log decays. documents [N, L]; before [N]: those that the state which comes in belongs to.
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


def _one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor | None,
    documents: torch.Tensor | None,
    before: torch.Tensor | None,
    state: torch.Tensor,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result [N, L, M] of a chunk [N, L, ...], and the state [N, K, M] after it."""
    scores = _triangle(torch.bmm(q, k.transpose(1, 2)), reverse)  # [N, L, L]
    lead, keep, fade = _faded(scores, gates, documents, before, reverse)
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
    """As reference.linear_attention; `reverse` goes from the last token to the first (op.py says what that is for)."""
    (B, H, T, K), M = q.shape, v.shape[3]
    compute = wide(q.dtype)
    out = v.new_empty(B, H, T, M)
    if reverse and log_decay is not None:
        # From the end, a state decays by what the next token brought; nothing comes after the last.
        log_decay = torch.cat((log_decay[..., 1:], torch.zeros_like(log_decay[..., :1])), -1)
    q, k, v = (each.reshape(B * H, T, each.shape[3]) for each in (q, k, v))
    gates = None if log_decay is None else log_decay.reshape(B * H, T).to(compute)
    places = None if documents is None else documents.repeat_interleave(H, 0)  # [B * H, T]
    carry = q.new_zeros(B * H, K, M, dtype=compute) if state is None else state.reshape(B * H, K, M).to(compute)
    result, starts = out.view(B * H, T, M), range(0, T, chunk)
    for start in reversed(starts) if reverse else starts:
        span = slice(start, min(start + chunk, T))
        edge = min(span.stop, T - 1) if reverse else max(start - 1, 0)
        result[:, span], carry = _one(
            q[:, span].to(compute),
            k[:, span].to(compute),
            v[:, span].to(compute),
            None if gates is None else gates[:, span],
            None if places is None else places[:, span],
            None if places is None else places[:, edge],
            carry,
            reverse,
        )
    # With no token the carry is the caller's own state, which an operator may not hand back.
    return out, carry.view(B, H, K, M) if T else carry.view(B, H, K, M).clone()
