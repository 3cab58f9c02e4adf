"""What operators over whole experts on the CPU share: how rows become blocks that stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK_BYTES = 2**20
"""Of one hidden array of a block: a backward works on several of them."""
LEAST_ROWS = 256
"""Of a block, where a group has as many: fewer would read the weights too often."""
LANES = 32
"""Torch computes what is left of so many elements one by one, and rounds it otherwise than the rest."""


def even(x: torch.Tensor, weights: torch.Tensor) -> bool:
    """On a CPU: whether rows x [M, D] through weights [E, F, D] get the same bits wherever in a group they stand."""
    return x.device.type == "cpu" and x.dtype == weights.dtype and weights.shape[1] % LANES == 0


def blocks(counts: torch.Tensor, hidden: torch.Tensor) -> Iterator[tuple[int, slice, bool]]:
    """(group, rows, whether it is the group's first block) for all groups that have rows of hidden [M, F].

    Raises ValueError for counts that do not sum to M.
    """
    most = max(LEAST_ROWS, BLOCK_BYTES // max(1, hidden.shape[1] * hidden.element_size()))
    start = 0
    for group, count in enumerate(counts.tolist()):
        # Parts of equal length, as near as may be to `most`: a short last one would move all weights for few rows.
        length = -(-count // max(1, round(count / most)))
        for at in range(start, start + count, max(1, length)):
            yield group, slice(at, min(at + length, start + count)), at == start
        start += count
    if start != hidden.shape[0]:
        raise ValueError(f"the counts sum to {start}, x has {hidden.shape[0]} rows")


def fresh(*like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Memory for the gradient of each, laid out as operators promise what they return: contiguous."""
    return tuple(torch.empty_like(one, memory_format=torch.contiguous_format) for one in like)


def clear_empty(counts: torch.Tensor, *gradients: torch.Tensor | None) -> None:
    """Zeros for the groups that have no rows: no block writes them."""
    for group, count in enumerate(counts.tolist()):
        for one in gradients:
            if count == 0 and one is not None:
                one[group].zero_()
