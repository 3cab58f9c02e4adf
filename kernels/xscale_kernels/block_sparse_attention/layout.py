"""Block layout of sparse attention in compressed rows: key blocks per query block, the transpose, and work orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

LEAST_PIECE = 32
"""Columns of at most this many query blocks are not split."""


@dataclass(frozen=True)
class BlockLayout:
    """Layout built once per shape by `layout_from_mask`; L is 1 (all heads share it) or H."""

    block: int
    """Tokens in a block, of queries and of keys."""
    heads: int
    """L."""
    rows: int
    """Query blocks, R."""
    columns: int
    """Key blocks, C."""
    key_starts: torch.Tensor
    """[L * R + 1] int32: start of the key blocks of head l and query block r in `key_blocks`, at index l * R + r."""
    key_blocks: torch.Tensor
    """[nnz] int32, ascending in each row."""
    query_starts: torch.Tensor
    """[L * C + 1] int32: the same for the transpose, into `query_blocks`."""
    query_blocks: torch.Tensor
    """[nnz] int32."""
    row_order: torch.Tensor
    """[L * R] int32: the query blocks of each head, those with the most key blocks first."""
    jobs: torch.Tensor
    """[J, 4] int32, the longest first: a piece of a column, as (l * C + c, its first entry of `query_blocks`, the end,
    slot). A column has one job with slot -1; one with many more entries than the mean is split into jobs with a slot
    each."""
    sums: torch.Tensor
    """[X, 3] int32: (l * C + c, first slot, end) of the split columns."""
    slots: int
    """Jobs with a slot."""

    def density(self, *, causal: bool) -> float:
        """Fraction of the blocks that are visible; `causal`: of those at or before the diagonal, which ends at the
        last key block.
        """
        if not causal:
            return self.key_blocks.numel() / max(self.heads * self.rows * self.columns, 1)
        shift = self.columns - self.rows
        allowed = torch.ones(self.rows, self.columns, dtype=torch.bool).tril(shift)
        return int((self.mask().cpu() & allowed).sum()) / max(self.heads * int(allowed.sum()), 1)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors, in the order of `from_parts`."""
        return [getattr(self, name) for name in TENSORS]

    def sizes(self) -> list[int]:
        """The numbers, in the order of `from_parts`."""
        return [self.block, self.heads, self.rows, self.columns, self.slots]

    @staticmethod
    def from_parts(tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> BlockLayout:
        """Build a layout from `tensors()` and `sizes()`, which a torch.library operator can take."""
        block, heads, rows, columns, slots = sizes
        named = dict(zip(TENSORS, tensors, strict=True))
        return BlockLayout(
            block=block, heads=heads, rows=rows, columns=columns, slots=slots, **named
        )

    def mask(self) -> torch.Tensor:
        """Block mask [L, R, C] bool."""
        counts = self.key_starts.diff()
        at = torch.arange(counts.shape[0], device=counts.device).repeat_interleave(counts)
        out = torch.zeros(counts.shape[0], self.columns, dtype=torch.bool, device=counts.device)
        out[at, self.key_blocks.long()] = True
        return out.view(self.heads, self.rows, self.columns)


TENSORS = tuple(entry.name for entry in fields(BlockLayout) if entry.type == "torch.Tensor")


def _compressed(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    counts = mask.flatten(0, 1).sum(1)
    starts = torch.zeros(counts.shape[0] + 1, dtype=torch.int32, device=mask.device)
    starts[1:] = counts.cumsum(0)
    return starts, mask.nonzero()[:, 2].to(torch.int32)


def _longest_first(starts: torch.Tensor, lines: int) -> torch.Tensor:
    """Order of the lines of each head by decreasing length, [L * lines]."""
    lengths = starts.diff().view(-1, lines) if lines else starts.diff()
    return lengths.argsort(dim=-1, descending=True, stable=True).flatten().to(torch.int32)


def _column_jobs(starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Jobs, sums and slots of columns with entries starts[i] .. starts[i + 1].

    A column of more than twice the mean is split, so at most half as many slots exist as columns, unless all are short.
    """
    counts = starts.diff().long()
    lines = counts.shape[0]
    piece = max(LEAST_PIECE, 2 * int(starts[-1]) // max(lines, 1))
    pieces = (-(-counts // piece)).clamp(min=1)
    lengths = -(-counts // pieces)
    line = torch.arange(lines, device=starts.device).repeat_interleave(pieces)
    part = torch.arange(line.shape[0], device=starts.device) - (pieces.cumsum(0) - pieces)[line]
    first = (starts[line] + part * lengths[line]).minimum(starts[line + 1])
    end = (first + lengths[line]).minimum(starts[line + 1])
    split = (pieces > 1)[line]
    slot = torch.where(split, split.cumsum(0) - 1, -1)
    jobs = torch.stack((line, first, end, slot), 1)
    order = (end - first).argsort(descending=True, stable=True)
    split_columns = (pieces > 1).nonzero()[:, 0]
    last = pieces[split_columns].cumsum(0)
    sums = torch.stack((split_columns, last - pieces[split_columns], last), 1)
    return jobs[order].to(torch.int32), sums.to(torch.int32), int(split.sum())


def layout_from_mask(mask: torch.Tensor, block: int) -> BlockLayout:
    """Build a layout from mask [L, R, C] bool: in head l, query block r sees key block c if mask[l, r, c].

    The layout is on the mask's device, which must be the one of attention.
    """
    if mask.dim() != 3 or mask.dtype is not torch.bool:
        raise ValueError(
            f"layout_from_mask takes a bool mask [L, R, C], got {[*mask.shape]} of {mask.dtype}"
        )
    key_starts, key_blocks = _compressed(mask)
    query_starts, query_blocks = _compressed(mask.transpose(1, 2).contiguous())
    L, R, C = mask.shape
    jobs, sums, slots = _column_jobs(query_starts)
    return BlockLayout(
        block,
        L,
        R,
        C,
        key_starts,
        key_blocks,
        query_starts,
        query_blocks,
        _longest_first(key_starts, R),
        jobs,
        sums,
        slots,
    )
