"""linear_attention a few chunks at a time in torch: products inside a chunk, one state from chunk to chunk."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from xscale_kernels import rows
from xscale_kernels.rows import wide

BLOCKS = 4
"""Blocks of rows (`rows.CACHE_BYTES`) that the chunks taken at a time fill: what they make stays in a core's cache."""


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
    """Weighs scores [N, n, L, L] in place; shares of the state that comes in [N, n, L], of the keys that it keeps
    [N, n, L] and of itself that goes on [N, n]; None for all of it.

    gates [N, n, L]: log decays. documents [N, n, L]; before [N, n]: those that the states which come in belong to.
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


def _some(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor | None,
    documents: torch.Tensor | None,
    before: torch.Tensor | None,
    state: torch.Tensor,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result [N, n, L, M] of n chunks [N, n, L, ...] that follow each other, and the state [N, K, M] after them."""
    scores = _triangle(q @ k.mT, reverse)  # [N, n, L, L]
    lead, keep, fade = _faded(scores, gates, documents, before, reverse)
    out = scores @ v
    added = (k if keep is None else k * keep[..., None]).mT @ v  # [N, n, K, M]
    states = torch.empty_like(added)
    count = added.shape[1]
    for at in reversed(range(count)) if reverse else range(count):
        states[:, at] = state
        faded = state if fade is None else state * fade[:, at, None, None]
        state = faded + added[:, at]
    led = q if lead is None else q * lead[..., None]
    out.flatten(0, 1).baddbmm_(led.flatten(0, 1), states.flatten(0, 1))
    return out, state


def _spans(T: int, chunk: int, most: int) -> Iterator[tuple[slice, int]]:
    """Runs of at most so many chunks, and the length of the chunks in them: the last one may be shorter."""
    whole = T // chunk
    for at in range(0, whole, most):
        yield slice(at * chunk, min(at + most, whole) * chunk), chunk
    if T % chunk:
        yield slice(whole * chunk, T), T % chunk


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
    out, last = v.new_empty(B, H, T, M), q.new_zeros(B, H, K, M, dtype=compute)
    if state is not None:
        last.copy_(state)
    if reverse and log_decay is not None:
        # From the end, a state decays by what the next token brought; nothing comes after the last.
        log_decay = torch.cat((log_decay[..., 1:], torch.zeros_like(log_decay[..., :1])), -1)
    # What a chunk of one head holds: its rows, its scores and two states.
    size = compute.itemsize * (2 * min(chunk, T) * (K + M + min(chunk, T)) + 2 * K * M)
    most = max(1, BLOCKS * rows.CACHE_BYTES * torch.get_num_threads() // max(size, 1))
    heads = min(H, most)
    batch = min(B, max(1, most // max(heads, 1)))
    runs = list(_spans(T, chunk, max(1, most // max(heads * batch, 1))))
    for b in range(0, B, batch):
        for h in range(0, H, heads):
            here = (slice(b, b + batch), slice(h, h + heads))
            carry = last[here].flatten(0, 1)
            for span, length in reversed(runs) if reverse else runs:
                tokens = (*here, span)
                shape = (len(carry), -1, length)
                places, before = None, None
                if documents is not None:
                    mine = documents[here[0]].repeat_interleave(len(carry) // len(documents[here[0]]), 0)
                    starts = torch.arange(span.start, span.stop, length, device=q.device)
                    places = mine[:, span].reshape(shape)
                    before = mine[:, (starts + length).clamp(max=T - 1) if reverse else (starts - 1).clamp(min=0)]
                found, carry = _some(
                    q[tokens].to(compute).reshape(*shape, K),
                    k[tokens].to(compute).reshape(*shape, K),
                    v[tokens].to(compute).reshape(*shape, M),
                    None if log_decay is None else log_decay[tokens].to(compute).reshape(shape),
                    places,
                    before,
                    carry,
                    reverse,
                )
                out[tokens] = found.view(*out[tokens].shape)
            last[here] = carry.view(last[here].shape)
    return out, last
