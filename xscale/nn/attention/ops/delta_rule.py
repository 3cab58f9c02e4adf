"""The delta rule with and without decay, a chunk at a time (Yang et al. 2024, parallel delta rule; Yang, Kautz and
Hatamizadeh 2024, gated delta networks, section 3.3).

    S_t = exp(d_t) (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T,  o_t = S_t^T q_t

What a token writes, u_t = b_t (v_t - exp(d_t) S_(t-1)^T k_t), depends within a chunk on what those before it wrote: a
unit lower triangular system. With c_t the sum of the chunk's log decays up to t, the pair (t, j) has the factor
exp(c_t - c_j) for j <= t, which is at most 1, so that nothing overflows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.nn.attention.ops.recurrence import ChunkDecays, chunk_decays, widened

CHUNK = 64
"""Tokens of a chunk."""
SEGMENT_FEATURES = 1 << 18
"""Features of a segment processed at a time on a CPU: its intermediates stay in the cache, so time is linear."""


@dataclass(frozen=True)
class DeltaRule:
    """A sequence of T tokens under the delta rule: a recurrence that is linear in the state [B, H, F, K].

    Inputs in float32 at least; the outputs have the dtype of v.
    """

    q: Tensor
    """[B, H, T, F]."""
    k: Tensor
    """[B, H, T, F]."""
    v: Tensor
    """[B, H, T, K]."""
    strength: Tensor
    """b [B, H, T], the part of the stored value that is replaced."""
    log_decay: Tensor | None = None
    """d [B, H, T] <= 0; None: no decay."""
    documents: Tensor | None = None
    """[B, T]; the state starts from zero where they change. None: one document."""

    def outputs_and_state(self, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return o [B, H, T, K] and the last state, given the state [B, H, F, K] of the first token's document."""
        if state is None:
            state = self._empty(self.v.shape[-1])
        out = []
        for segment in self._segments():
            segment_out, state = segment.outputs_and_state(state)
            out.append(segment_out)
        return torch.cat(out, 2), state

    def transition(self) -> tuple[Tensor, Tensor]:
        """Return A [B, H, F, F] and E [B, H, F, K]: a state S before the sequence is A S + E after it."""
        identity = torch.eye(self.k.shape[-1], dtype=self.k.dtype, device=self.k.device)
        start = self._empty(self.v.shape[-1])
        state = torch.cat((start, identity.expand(*start.shape[:2], -1, -1)), -1)
        for segment in self._segments():
            state = segment.advance(state)
        width = self.v.shape[-1]
        return state[..., width:], state[..., :width]

    def _empty(self, width: int) -> Tensor:
        batch, heads, _, features = self.k.shape
        return self.k.new_zeros(batch, heads, features, width)

    def _segments(self) -> "Iterator[_Segment]":
        batch, heads, length, features = self.k.shape
        chunk = min(CHUNK, max(1, length))
        chunks = max(1, SEGMENT_FEATURES // (batch * heads * features * chunk))
        size = max(1, length) if self.q.is_cuda else chunks * chunk
        for start in range(0, max(1, length), size):
            span = slice(start, start + size)
            documents = before = None
            if self.documents is not None:
                documents = self.documents[:, span]
                before = self.documents[:, max(start - 1, 0)]
            log_decay = None if self.log_decay is None else self.log_decay[:, :, span]
            q, k, v, strength = (x[:, :, span] for x in (self.q, self.k, self.v, self.strength))
            yield _Segment.of(q, k, v, strength, chunk_decays(log_decay, documents, before, chunk), chunk)


@dataclass(frozen=True)
class _Segment:
    """Adjacent chunks, all of whose triangular systems are solved together; tensors are [B, H, N, C, ...]."""

    length: int
    q: Tensor
    k: Tensor
    reads: Tensor
    writes: Tensor
    """A token writes `writes - reads S`, with S the state before its chunk."""
    within: Tensor
    decays: ChunkDecays

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, strength: Tensor, decays: ChunkDecays, chunk: int) -> "_Segment":
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
        reads, writes = solved.split((k.shape[-1], v.shape[-1]), -1)
        within = decays.weigh(q @ k.mT).tril()
        return _Segment(length, decays.lead(q), decays.keep(k), reads, writes, within, decays)

    def outputs_and_state(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs [B, H, T, K] and the state after the segment."""
        out = []
        # Unbind once: the backward of each index would fill a full-size gradient, in quadratic time.
        chunks = zip(*(x.unbind(2) for x in (self.q, self.k, self.writes, self.reads, self.within)), strict=True)
        for (row, key, write, read, inside), fade in zip(chunks, self.decays.fades(self.k.shape[2]), strict=True):
            written = write - read @ state  # [B, H, C, K]
            out.append(row @ state + inside @ written)
            state = (state if fade is None else state * fade) + key.mT @ written
        return torch.cat(out, 2)[:, :, : self.length], state

    def advance(self, state: Tensor) -> Tensor:
        """Return the state [B, H, F, K + M] after the segment; nothing is written to the last M columns."""
        chunks = zip(*(x.unbind(2) for x in (self.k, self.writes, self.reads)), strict=True)
        for (key, write, read), fade in zip(chunks, self.decays.fades(self.k.shape[2]), strict=True):
            written = widened(write, state.shape[-1]) - read @ state
            state = (state if fade is None else state * fade) + key.mT @ written
        return state
