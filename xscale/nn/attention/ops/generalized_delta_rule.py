"""The generalised delta rule of RWKV-7 (Peng et al. 2025), a chunk at a time.

    S_t = diag(exp(d_t)) S_(t-1) + b_t (a_t^T S_(t-1)) + k_t v_t^T,  o_t = S_t^T r_t

Each key channel decays by its own d_t, and what is read at a_t is written at b_t. What is read, u_t = S_(t-1)^T a_t,
depends within a chunk on what was read before it: a unit lower triangular system, of products that decay in each
channel (`decayed_products`), so that no exponential is more than 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from xscale.nn.attention.ops.decayed_sums import chunk_of, decayed_products, in_chunks
from xscale.nn.attention.ops.recurrence import widened
from xscale_kernels.delta_rule.chunked import document_masks


@dataclass(frozen=True)
class GeneralizedDeltaRule:
    """A sequence of T tokens under the generalised delta rule: a `Recurrence`.

    Inputs in float32 at least; the outputs have the dtype of v.
    """

    r: Tensor
    """[B, H, T, F]."""
    log_decay: Tensor
    """d [B, H, T, F] <= 0."""
    k: Tensor
    """[B, H, T, F]."""
    v: Tensor
    """[B, H, T, K]."""
    a: Tensor
    """[B, H, T, F], where the state is read."""
    b: Tensor
    """[B, H, T, F], where what is read is written."""
    documents: Tensor | None = None
    """[B, T]; the state starts from zero where they change. None: one document."""

    def outputs_and_state(self, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return o [B, H, T, K] and the last state, given the state [B, H, F, K] of the first token's document."""
        if state is None:
            state = self.k.new_zeros(*self.k.shape[:2], self.k.shape[-1], self.v.shape[-1])
        out = []
        chunks = self._chunks()
        # Unbind once: the backward of each index would fill a full-size gradient, in quadratic time.
        for row, within, local, *step in zip(
            *(x.unbind(2) for x in (*chunks.answers, *chunks.steps)), strict=True
        ):
            read, state_after = _advance(state, *step)
            out.append(local + row @ state + within @ read)
            state = state_after
        return torch.cat(out, 2)[:, :, : self.r.shape[2]], state

    def transition(self) -> tuple[Tensor, Tensor]:
        """Return A [B, H, F, F] and E [B, H, F, K]."""
        width, features = self.v.shape[-1], self.k.shape[-1]
        identity = torch.eye(features, dtype=self.k.dtype, device=self.k.device).expand(
            *self.k.shape[:2], -1, -1
        )
        state = torch.cat((self.k.new_zeros(*self.k.shape[:2], features, width), identity), -1)
        for step in zip(*(x.unbind(2) for x in self._chunks().steps), strict=True):
            _, state = _advance(state, *step)
        ended, matrix = state[..., :width], state[..., width:]
        return matrix, ended

    def _chunks(self) -> "_Chunks":
        chunk = chunk_of(self.r.shape[2])
        r, k, v, a, b, decay = (
            in_chunks(x, chunk) for x in (self.r, self.k, self.v, self.a, self.b, self.log_decay)
        )
        sums = decay.cumsum(-2)  # [B, H, N, C, F]
        ahead, total = sums - decay, sums[..., -1:, :]
        # A token reads the state before it, and answers from the one after it.
        rows, ends = torch.stack((a, r)), torch.stack((ahead, sums))
        products = decayed_products(
            rows[:, None], torch.stack((b, k)), ends[:, None], sums
        )  # [2, 2, B, H, N, C, C]
        lead, keep, fade = (
            ends.exp(),
            (total - sums).exp(),
            total.exp().mT,
        )  # [2, ...], ..., [B, H, N, F, 1]
        if self.documents is not None:
            same, first, last = document_masks(self.documents, self.documents[:, 0], chunk)
            products = products * same[:, None]
            lead, keep = lead * first[:, None, ..., None], keep * last[:, None, ..., None]
            fade = fade * first[:, None, :, -1, None, None]
        reads, answers = products.unbind(0)
        read_rows, answer_rows = (rows * lead).unbind(0)
        within_b, within_k = (
            answers[at] + torch.diag_embed((r * written).sum(-1))
            for at, written in enumerate((b, k))
        )
        lower = torch.eye(chunk, dtype=k.dtype, device=k.device) - reads[0]
        right = torch.cat((read_rows, reads[1] @ v), -1)
        solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        by_state, by_values = solved.split((k.shape[-1], v.shape[-1]), -1)
        return _Chunks(
            answers=(answer_rows, within_b, within_k @ v),
            steps=(by_state, by_values, (b * keep).mT, (k * keep).mT @ v, fade),
        )


@dataclass(frozen=True)
class _Chunks:
    """All chunks of a sequence with their systems solved, [B, H, N, ...]."""

    answers: tuple[Tensor, Tensor, Tensor]
    """Rows by which the outputs read the state, their weights of what the tokens read, and what values add."""
    steps: tuple[Tensor, ...]
    """Rows that tokens read of the state before the chunk, and of the chunk's values; the rows where that is written;
    the sum that the values add to the state; and its decay."""


def _advance(
    state: Tensor, by_state: Tensor, by_values: Tensor, written: Tensor, added: Tensor, fade: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the rows [B, H, C, K] that a chunk's tokens read, and the state after it."""
    read = by_state @ state + widened(by_values, state.shape[-1])
    return read, state * fade + written @ read + widened(added, state.shape[-1])
