"""Recurrences that are linear in their state, and how the tokens of a chunk decay: what recurrent mixers share.

A sequence takes a state S to A S + E. So a shard of a sequence needs no more of the tokens before it than their state,
which the shards before it give by their A and E.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Recurrence(Protocol):
    """A sequence of tokens with a state [B, H, F, K] that passes from token to token."""

    def outputs_and_state(self, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return o [B, H, T, K] and the state after the sequence, given the state before it; None: zeros.

        The state before it is of the first token's document.
        """
        ...

    def transition(self) -> tuple[Tensor, Tensor]:
        """Return A [B, H, F, F], or [B, H, F, 1] or [B, H, 1, 1] if it is diagonal, and E [B, H, F, K]."""
        ...


def advance_state(matrix: Tensor, state: Tensor) -> Tensor:
    """A S for the A of `Recurrence.transition` and a state S [B, H, F, K]."""
    return matrix * state if matrix.shape[-1] == 1 else matrix @ state


def widened(x: Tensor, width: int) -> Tensor:
    """Append zeros to the last axis up to `width`."""
    return F.pad(x, (0, width - x.shape[-1]))


@dataclass(frozen=True)
class ChunkDecays:
    """How the pairs of a chunk's tokens decay by one number a token and head, and which are of the same document."""

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
        """Decay rows [B, H, N, C, F] that read the state before the chunk."""
        rows = rows if self.sums is None else rows * self.sums.exp()[..., None]
        return rows if self.first is None else rows * self.first[..., None]

    def keep(self, rows: Tensor) -> Tensor:
        """Decay rows [B, H, N, C, F] from their token to the end of the chunk."""
        rows = rows if self.sums is None else rows * (self.sums[..., -1:] - self.sums).exp()[..., None]
        return rows if self.last is None else rows * self.last[..., None]

    def fades(self, chunks: int) -> Sequence[Tensor | None]:
        """Factors [B, H or 1, 1, 1] of the state over each chunk; None stands for 1."""
        fade = None if self.sums is None else self.sums[..., -1].exp()
        if self.first is not None:
            kept = self.first[..., -1]
            fade = kept if fade is None else fade * kept
        return [None] * chunks if fade is None else fade[..., None, None].unbind(2)


def chunk_decays(log_decay: Tensor | None, documents: Tensor | None, before: Tensor | None, chunk: int) -> ChunkDecays:
    """Cut log decays [B, H, T] and documents [B, T] into chunks; `before` [B]: the document of the state before."""
    sums = None
    if log_decay is not None:
        padded = F.pad(log_decay, (0, -log_decay.shape[2] % chunk))
        sums = padded.view(*padded.shape[:2], -1, chunk).cumsum(-1)
    if documents is None or before is None:
        return ChunkDecays(sums, None, None, None)
    same, first, last = document_masks(documents, before, chunk)
    return ChunkDecays(sums, same[:, None], first[:, None], last[:, None])


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
