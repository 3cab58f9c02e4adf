"""linear_attention a chunk at a time in torch: products inside a chunk, one state from chunk to chunk."""

from __future__ import annotations

import torch

from xscale_kernels.rows import wide


def _turned(
    tensors: tuple[torch.Tensor, ...], log_decay: torch.Tensor | None, documents: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None, torch.Tensor | None]:
    """The same sequences from the end to the start; there a state decays by what the next token brought."""
    if log_decay is not None:
        log_decay = torch.cat((log_decay[..., 1:], torch.zeros_like(log_decay[..., :1])), -1).flip(-1)
    return tuple(each.flip(2) for each in tensors), log_decay, None if documents is None else documents.flip(1)


def _one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sums: torch.Tensor | None,
    documents: torch.Tensor | None,
    before: torch.Tensor | None,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk's result [N, L, M] and the state after it. sums [N, L]: of the log decays from the chunk's start.

    before: [N], the document that the state belongs to.
    """
    scores = torch.bmm(q, k.transpose(1, 2)).tril_()  # [N, L, L]
    lead = keep = None
    fade: torch.Tensor | None = None
    if sums is not None:
        distance = (sums[:, :, None] - sums[:, None, :]).tril_()
        scores.mul_(distance.exp_())
        lead, keep, fade = sums.exp(), (sums[:, -1:] - sums).exp(), sums[:, -1].exp()
    if documents is not None and before is not None:
        scores.mul_(documents[:, :, None] == documents[:, None, :])
        same, last = documents == before[:, None], documents == documents[:, -1:]
        lead = same.to(q.dtype) if lead is None else lead * same
        keep = last.to(q.dtype) if keep is None else keep * last
        fade = same[:, -1].to(q.dtype) if fade is None else fade * same[:, -1]
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
    if reverse:
        (q, k, v), log_decay, documents = _turned((q, k, v), log_decay, documents)
    q, k, v = (each.reshape(B * H, T, each.shape[3]) for each in (q, k, v))
    gates = None if log_decay is None else log_decay.reshape(B * H, T).to(compute)
    places = None if documents is None else documents.repeat_interleave(H, 0)  # [B * H, T]
    carry = q.new_zeros(B * H, K, M, dtype=compute) if state is None else state.reshape(B * H, K, M).to(compute)
    result = out.view(B * H, T, M)
    for start in range(0, T, chunk):
        span = slice(start, min(start + chunk, T))
        inside, carry = _one(
            q[:, span].to(compute),
            k[:, span].to(compute),
            v[:, span].to(compute),
            None if gates is None else gates[:, span].cumsum(1),
            None if places is None else places[:, span],
            None if places is None else places[:, max(start - 1, 0)],
            carry,
        )
        if reverse:
            result[:, T - span.stop : T - span.start] = inside.flip(1)
        else:
            result[:, span] = inside
    # With no token the carry is the caller's own state, which an operator may not hand back.
    return out, carry.view(B, H, K, M) if T else carry.view(B, H, K, M).clone()
