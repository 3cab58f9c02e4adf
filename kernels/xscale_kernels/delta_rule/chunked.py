"""delta_rule a chunk at a time in torch (Yang et al. 2024, parallel delta rule; Yang, Kautz and Hatamizadeh 2024,
section 3.3).

A token writes u_t = b_t (v_t - e^{d_t} S_{t-1}^T k_t), which depends within a chunk on what those before it wrote: a
unit lower triangular system. With c_t the sum of the chunk's log decays up to t, the pair (t, j) has the factor
e^{c_t - c_j} for j <= t, which is at most 1, so that nothing overflows. The gradients are autograd's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from xscale_kernels.rows import wide

Tensor = torch.Tensor
SEGMENT_FEATURES = 1 << 18
"""Features of a segment processed at a time on a CPU: its intermediates stay in the cache, so time is linear."""


@dataclass(frozen=True)
class ChunkDecays:
    """How the pairs of a chunk's tokens decay, and which are of the same document."""

    sums: Tensor | None
    """[B, H, N, C], the sums of the chunk's log decays up to each token; None: no decay."""
    same: Tensor | None
    """[B, 1, N, C, C], whether two tokens are of the same document; None: one document."""
    first: Tensor | None
    """[B, 1, N, C], whether a token is of the document of the state before its chunk."""
    last: Tensor | None
    """[B, 1, N, C], whether a token is of the document of the chunk's last one."""

    def weigh(self, scores: Tensor) -> Tensor:
        """Decay the scores [B, H, N, C, C] of pairs (t, j <= t); those above the diagonal are arbitrary."""
        if self.sums is not None:
            # The triangle before the exponential: above the diagonal it could overflow.
            scores = scores * (self.sums[..., :, None] - self.sums[..., None, :]).tril().exp()
        return scores if self.same is None else scores * self.same

    def lead(self, rows: Tensor) -> Tensor:
        """Decay rows [B, H, N, C, K] that read the state before the chunk."""
        rows = rows if self.sums is None else rows * self.sums.exp()[..., None]
        return rows if self.first is None else rows * self.first[..., None]

    def keep(self, rows: Tensor) -> Tensor:
        """Decay rows [B, H, N, C, K] from their token to the end of the chunk."""
        rows = (
            rows if self.sums is None else rows * (self.sums[..., -1:] - self.sums).exp()[..., None]
        )
        return rows if self.last is None else rows * self.last[..., None]

    def fades(self, chunks: int) -> Sequence[Tensor | None]:
        """Factors [B, H or 1, 1, 1] of the state over each chunk; None stands for 1."""
        fade = None if self.sums is None else self.sums[..., -1].exp()
        if self.first is not None:
            kept = self.first[..., -1]
            fade = kept if fade is None else fade * kept
        return [None] * chunks if fade is None else fade[..., None, None].unbind(2)


def document_masks(documents: Tensor, before: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens of a chunk share a document: with each other [B, N, C, C], with the state before the chunk
    [B, N, C], and with the chunk's last token [B, N, C].

    documents [B, T], `before` [B]. Tokens of padding are of the last token's document.
    """
    padding = documents[:, -1:].expand(-1, -documents.shape[1] % chunk)
    chunks = torch.cat((documents, padding), 1).view(len(documents), -1, chunk)  # [B, N, C]
    ahead = torch.cat((before[:, None], chunks[:, :-1, -1]), 1)  # [B, N]
    same = chunks[..., :, None] == chunks[..., None, :]
    return same, chunks == ahead[..., None], chunks == chunks[..., -1:]


def _decays(
    log_decay: Tensor | None, documents: Tensor | None, before: Tensor | None, chunk: int
) -> ChunkDecays:
    """Cut log decays [B, H, T] and documents [B, T] into chunks; `before` [B]: the document of the state before."""
    sums = None
    if log_decay is not None:
        padded = F.pad(log_decay, (0, -log_decay.shape[2] % chunk))
        sums = padded.view(*padded.shape[:2], -1, chunk).cumsum(-1)
    if documents is None or before is None:
        return ChunkDecays(sums, None, None, None)
    same, first, last = document_masks(documents, before, chunk)
    return ChunkDecays(sums, same[:, None], first[:, None], last[:, None])


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    strength: Tensor,
    log_decay: Tensor | None,
    documents: Tensor | None,
    state: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Chunked `reference_scan`."""
    batch, heads, length, features = k.shape
    dtype, compute = v.dtype, wide(q.dtype)
    q, k, v, strength = (x.to(compute) for x in (q, k, v, strength))
    log_decay = None if log_decay is None else log_decay.to(compute)
    carry = k.new_zeros(batch, heads, features, v.shape[-1]) if state is None else state.to(compute)
    chunk = min(chunk, length)
    chunks = max(1, SEGMENT_FEATURES // (batch * heads * features * chunk))
    size = length if q.is_cuda else chunks * chunk
    out = []
    for start in range(0, length, size):
        span, before = slice(start, start + size), None
        if documents is not None:
            before = documents[:, max(start - 1, 0)]
        decays = _decays(
            None if log_decay is None else log_decay[:, :, span],
            None if documents is None else documents[:, span],
            before,
            chunk,
        )
        rows, keys, values, strengths = (x[:, :, span] for x in (q, k, v, strength))
        segment, carry = _segment(rows, keys, values, strengths, decays, carry, chunk)
        out.append(segment)
    return torch.cat(out, 2).to(dtype), carry


def _segment(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    strength: Tensor,
    decays: ChunkDecays,
    state: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Apply the rule to adjacent chunks, given the state before them; return their output and the new state."""
    length = q.shape[2]
    after = -length % chunk
    shape = (*q.shape[:2], -1, chunk)
    q, k, v = (F.pad(x, (0, 0, 0, after)).view(*shape, x.shape[-1]) for x in (q, k, v))
    strength = F.pad(strength, (0, after)).view(shape)
    # Within a chunk each written value depends on those before it: (1 + lower) written = b (v - k S).
    scaled = k * strength[..., None]
    eye = torch.eye(chunk, dtype=k.dtype, device=k.device)
    lower = decays.weigh(scaled @ k.mT).tril(-1) + eye  # [B, H, N, C, C]
    right = torch.cat((decays.lead(scaled), v * strength[..., None]), -1)
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    reads, writes = solved[..., : k.shape[-1]], solved[..., k.shape[-1] :]
    within = decays.weigh(q @ k.mT).tril()
    out = []
    # Unbind once: the backward of each index would fill a full-size gradient, in quadratic time.
    chunks = zip(
        *(x.unbind(2) for x in (decays.lead(q), decays.keep(k), writes, reads, within)), strict=True
    )
    for (row, key, write, read, inside), fade in zip(chunks, decays.fades(k.shape[2]), strict=True):
        written = write - read @ state  # [B, H, C, M]
        out.append(row @ state + inside @ written)
        state = (state if fade is None else state * fade) + key.mT @ written
    return torch.cat(out, 2)[:, :, :length], state
