"""Blocks of rows that stay in a core's cache while several operations pass over them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CACHE_BYTES = 2**18


def row_blocks(tensor: torch.Tensor, least: int = 8) -> Iterator[slice]:
    """Spans over dim 0 of [N, D]: about CACHE_BYTES each (the best of 64 KB to 4 MB when measured), or `least` rows."""
    rows = max(least, CACHE_BYTES // max(tensor.shape[1] * tensor.element_size(), 1))
    return (slice(start, start + rows) for start in range(0, tensor.shape[0], rows))


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a row of this dtype is computed in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)
