"""Additive bias on the scores of block-sparse attention, read a chunk of blocks at a time.

Either one number for each score, or one for each relative position (ALiBi, T5's buckets), whose memory is linear in the
length.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.nn.attention.ops.block_plan import UnitChunk


@dataclass(frozen=True)
class ScoreBias:
    """One number for each score."""

    numbers: Tensor
    """[B or 1, H or 1, rows, Q, columns, b]."""

    def gather(self, chunk: UnitChunk) -> Tensor:
        """Return the bias of a chunk's scores: [U, Q, d*b]."""
        batch, heads, rows, columns = self._index(chunk)
        return self.numbers[batch, heads, rows, :, columns].transpose(1, 2).flatten(2)

    def scatter_add(self, gradient: Tensor, scores: Tensor, chunk: UnitChunk) -> None:
        """Add the gradient of a chunk's scores [U, Q, d*b] to the bias' `gradient`, where `gather` read."""
        blocks = scores.view(*scores.shape[:2], -1, gradient.shape[-1]).transpose(
            1, 2
        )  # [U, d, Q, b]
        by_block = gradient.permute(0, 1, 2, 4, 3, 5)  # [B, H, rows, columns, Q, b]
        by_block.index_put_(self._index(chunk), blocks.to(gradient.dtype), accumulate=True)

    def _index(self, chunk: UnitChunk) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        batch = chunk.batch if self.numbers.shape[0] > 1 else torch.zeros_like(chunk.batch)
        heads = chunk.heads if self.numbers.shape[1] > 1 else torch.zeros_like(chunk.heads)
        return batch[:, None], heads[:, None], chunk.rows[:, None], chunk.columns


@dataclass(frozen=True)
class RelativeBias:
    """One number for each relative position key - query."""

    numbers: Tensor
    """[H, N], one for each of `offsets`, ascending."""
    rows: int
    """Query blocks."""
    queries: int
    """Q, queries of a block."""
    block: int
    """b, keys of a block."""

    @staticmethod
    def offsets(first_query: int, rows: int, queries: int, keys: int) -> range:
        """Return all relative positions key - query that occur (negative = past)."""
        last = first_query + rows * queries - 1
        return range(-last, keys - first_query)

    def gather(self, chunk: UnitChunk) -> Tensor:
        """Return the bias of a chunk's scores: [U, Q, d*b]."""
        inside = torch.arange(self.queries, device=self.numbers.device)
        starts = self._start(chunk)[:, None, :] + (self.queries - 1 - inside)[:, None]  # [U, Q, d]
        windows = self.numbers.unfold(-1, self.block, 1)  # [H, N - b + 1, b]
        return windows[chunk.heads[:, None, None], starts].flatten(2)

    def scatter_add(self, gradient: Tensor, scores: Tensor, chunk: UnitChunk) -> None:
        """Add the gradient of a chunk's scores [U, Q, d*b] to the bias' `gradient`, where `gather` read."""
        size = self.queries
        blocks = (
            scores.view(*scores.shape[:2], -1, self.block).transpose(1, 2).flatten(0, 1)
        )  # [U*d, Q, b]
        # Shift each row one column to the right of the row below it, so that a column is one relative position.
        skewed = F.pad(blocks.flip(1), (0, size)).flatten(1)[:, :-size].view(len(blocks), size, -1)
        sums = skewed.sum(1)  # [U*d, Q + b - 1]
        starts = chunk.heads[:, None] * gradient.shape[1] + self._start(chunk)  # [U, d]
        index = starts.flatten()[:, None] + torch.arange(sums.shape[1], device=gradient.device)
        gradient.view(-1).index_put_((index,), sums.to(gradient.dtype), accumulate=True)

    def _start(self, chunk: UnitChunk) -> Tensor:
        """[U, d], index in `numbers` of the relative position of each block's first key to the unit's last query."""
        last = self.rows - 1 - chunk.rows
        return chunk.columns * self.block + (last * self.queries)[:, None]


Bias = ScoreBias | RelativeBias
