"""The definition of squared_norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xscale_kernels.rows import wide


def squared_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of all elements, in float32 at least."""
    total = torch.zeros((), dtype=wide(tensors[0].dtype), device=tensors[0].device)
    for each in tensors:
        total = total + each.to(total.dtype).square().sum()
    return total
