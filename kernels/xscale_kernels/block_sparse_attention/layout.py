"""Which key blocks each query block sees, as compressed rows, and which query blocks see each key block."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockLayout:
    """Made once for a shape by `layout_from_mask` and kept by the caller; L is 1 (all heads alike) or H."""

    block: int
    """Tokens in a block, of queries and of keys."""
    heads: int
    """L."""
    rows: int
    """Query blocks, R."""
    columns: int
    """Key blocks, C."""
    key_starts: torch.Tensor
    """[L * R + 1] int32: where the key blocks of head l and query block r begin in `key_blocks`, at l * R + r."""
    key_blocks: torch.Tensor
    """[nnz] int32, ascending in each row."""
    query_starts: torch.Tensor
    """[L * C + 1] int32: the same from the key block's side, into `query_blocks`."""
    query_blocks: torch.Tensor
    """[nnz] int32."""

    @property
    def density(self) -> float:
        """The share of blocks that are there."""
        return self.key_blocks.numel() / max(self.heads * self.rows * self.columns, 1)

    def mask(self) -> torch.Tensor:
        """[L, R, C] bool: the layout it was made from."""
        counts = self.key_starts.diff()
        at = torch.arange(counts.shape[0], device=counts.device).repeat_interleave(counts)
        out = torch.zeros(counts.shape[0], self.columns, dtype=torch.bool, device=counts.device)
        out[at, self.key_blocks.long()] = True
        return out.view(self.heads, self.rows, self.columns)


def _compressed(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    counts = mask.flatten(0, 1).sum(1)
    starts = torch.zeros(counts.shape[0] + 1, dtype=torch.int32, device=mask.device)
    starts[1:] = counts.cumsum(0)
    return starts, mask.nonzero()[:, 2].to(torch.int32)


def layout_from_mask(mask: torch.Tensor, block: int) -> BlockLayout:
    """A layout from mask [L, R, C] bool: mask[l, r, c] says that query block r of head l sees key block c.

    The tensors are made where the mask is; build it on the device that attention runs on.
    """
    if mask.dim() != 3 or mask.dtype is not torch.bool:
        raise ValueError(f"a layout is made from [L, R, C] booleans, got {[*mask.shape]} of {mask.dtype}")
    key_starts, key_blocks = _compressed(mask)
    query_starts, query_blocks = _compressed(mask.transpose(1, 2).contiguous())
    L, R, C = mask.shape
    return BlockLayout(block, L, R, C, key_starts, key_blocks, query_starts, query_blocks)
