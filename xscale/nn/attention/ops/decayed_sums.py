"""Sums of key-value products that decay by a number a token, for each head or for each key channel.

    S_t = diag(exp(d_t)) S_(t-1) + k_t v_t^T,  o_t = S_t^T q_t

With one number a head this is the state space dual form (Dao and Gu 2024), which the fused operator of linear attention
computes. With one a channel it is gated linear attention (Yang et al. 2024), by chunks: the pair (t, j) has the factor
exp(c_t - c_j) in each channel, c the sums of the decays. `decayed_products` splits it at a token between them, so that
both parts are at most 1 and nothing overflows, whatever the decays are.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale_kernels.delta_rule.chunked import document_masks
from xscale_kernels.linear_attention.op import linear_attention

CHUNK = 64
"""Tokens of a chunk: a power of two."""


def decay_after(log_decay: Tensor) -> Tensor:
    """Sums of the log decays of the tokens after each token, of [B, H, T, ...]."""
    # Summed from the end: as a difference of sums from the start those of the last tokens would lose their digits.
    total = log_decay.flip(2).cumsum(2).flip(2)
    return F.pad(total.movedim(2, -1)[..., 1:], (0, 1)).movedim(-1, 2)


def decay_transition(
    k: Tensor, v: Tensor, log_decay: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return A [B, H, F or 1, 1] and E [B, H, F, K] of a sequence (`Recurrence.transition`).

    k [B, H, T, F], v [B, H, T, K], log_decay [B, H, T, F or 1], documents [B, T].
    """
    fade = log_decay.sum(2).exp()[..., None]
    keys = k * decay_after(log_decay).exp()
    if documents is not None:
        keys = keys * (documents == documents[:, -1:])[:, None, :, None]
        fade = fade * (documents[:, 0] == documents[:, -1])[:, None, None, None]
    return fade, keys.mT @ v.to(keys.dtype)


@dataclass(frozen=True)
class DecayedSums:
    """A sequence of T tokens whose state [B, H, F, K] decays by one number a token and head: a `Recurrence`."""

    q: Tensor
    """[B, H, T, F]."""
    k: Tensor
    """[B, H, T, F]."""
    v: Tensor
    """[B, H, T, K]."""
    log_decay: Tensor
    """d [B, H, T] <= 0, in float32 at least."""
    documents: Tensor | None = None
    """[B, T]; the state starts from zero where they change. None: one document."""
    kernel: str | None = None
    """Implementation of the operator linear_attention; None: the first that can."""

    def outputs_and_state(self, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return o [B, H, T, K] of v's dtype and the last state, given the state of the first token's document."""
        chunk = min(CHUNK, self.q.shape[2])
        return linear_attention(
            self.q, self.k, self.v, log_decay=self.log_decay, documents=self.documents, state=state, chunk=chunk,
            implementation=self.kernel,
        )  # fmt: skip

    def transition(self) -> tuple[Tensor, Tensor]:
        """Return A [B, H, 1, 1] and E [B, H, F, K]."""
        return decay_transition(self.k, self.v, self.log_decay[..., None], self.documents)


@dataclass(frozen=True)
class ChannelDecayedSums:
    """A sequence of T tokens, each key channel of whose state [B, H, F, K] has a decay: a `Recurrence`.

    Inputs in float32 at least; the outputs have the dtype of v.
    """

    q: Tensor
    """[B, H, T, F]."""
    k: Tensor
    """[B, H, T, F]."""
    v: Tensor
    """[B, H, T, K]."""
    log_decay: Tensor
    """d [B, H, T, F] <= 0."""
    documents: Tensor | None = None
    """[B, T]; the state starts from zero where they change. None: one document."""

    def outputs_and_state(self, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return o [B, H, T, K] and the last state, given the state of the first token's document."""
        length = self.q.shape[2]
        chunk = chunk_of(length)
        q, k, v, decay = (in_chunks(x, chunk) for x in (self.q, self.k, self.v, self.log_decay))
        sums = decay.cumsum(-2)
        total = sums[..., -1:, :]
        lead, keep, fade = (
            sums.exp(),
            (total - sums).exp(),
            total.exp().mT,
        )  # [B, H, N, C, F], ..., [B, H, N, F, 1]
        scores = decayed_products(q, k, sums, sums) + torch.diag_embed((q * k).sum(-1))
        if self.documents is not None:
            same, first, last = document_masks(self.documents, self.documents[:, 0], chunk)
            scores = scores * same[:, None]
            lead, keep = lead * first[:, None, ..., None], keep * last[:, None, ..., None]
            fade = fade * first[:, None, :, -1, None, None]
        inside = scores @ v
        rows = q * lead
        keys = (k * keep).mT
        if state is None:
            state = v.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
        out = []
        # Unbind once: the backward of each index would fill a full-size gradient, in quadratic time.
        for local, row, key, value, kept in zip(
            *(x.unbind(2) for x in (inside, rows, keys, v, fade)), strict=True
        ):
            out.append(local + row @ state)
            state = state * kept + key @ value
        return torch.cat(out, 2)[:, :, :length], state

    def transition(self) -> tuple[Tensor, Tensor]:
        """Return A [B, H, F, 1] and E [B, H, F, K]."""
        return decay_transition(self.k, self.v, self.log_decay, self.documents)


def chunk_of(length: int) -> int:
    """Return the power of two that chunks of a sequence have as their length, CHUNK at most."""
    return min(CHUNK, 1 << max(0, length - 1).bit_length())


def in_chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, H, T, F] -> [B, H, N, C, F], with zeros after the last token."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % chunk)).view(*x.shape[:2], -1, chunk, x.shape[3])


def decayed_products(rows: Tensor, keys: Tensor, ahead: Tensor, sums: Tensor) -> Tensor:
    """sum_f rows_tf keys_jf exp(ahead_tf - sums_jf) for j < t, zeros for j >= t: [..., C, C].

    rows, keys and the sums of log decays are [..., C, F], C a power of two; `ahead` of a token is at most the sum up to
    the token before it. Half of the pairs have their tokens on two sides of the middle: their exponents are split
    there. The pairs of each half follow in the same way.
    """
    chunk, size = rows.shape[-2], 1
    blocks = torch.zeros_like((rows[..., 0] * keys[..., 0])[..., None, None])  # [..., C, 1, 1]
    while size < chunk:
        row, ended, key, summed = (
            x.reshape(*x.shape[:-2], chunk // (2 * size), 2, size, x.shape[-1])
            for x in (rows, ahead, keys, sums)
        )
        middle = summed[..., 0, -1:, :]
        late = row[..., 1, :, :] * (ended[..., 1, :, :] - middle).exp()
        early = key[..., 0, :, :] * (middle - summed[..., 0, :, :]).exp()
        product = late @ early.mT  # [..., C / 2s, s, s]
        first, second = blocks[..., ::2, :, :], blocks[..., 1::2, :, :]
        upper = torch.cat((first, torch.zeros_like(product)), -1)
        blocks = torch.cat((upper, torch.cat((product, second), -1)), -2)
        size *= 2
    return blocks.squeeze(-3)
