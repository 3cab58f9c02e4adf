"""unpermute on the CPU: rows sorted by token and summed bag by bag, faster than adding rows one at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from xscale_kernels.permute import reference

spread = reference.spread


def unpermute(y: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor | None, N: int) -> torch.Tensor:
    """As reference.unpermute."""
    if y.shape[0] == 0:
        return y.new_zeros(N, y.shape[1])
    wide = torch.promote_types(y.dtype, torch.float32)
    ordered, order = tokens.sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(N + 1, device=y.device))  # [N + 1]
    scale = None if weights is None else weights.to(wide).index_select(0, order)
    bags = F.embedding_bag(order, y.to(wide), starts, mode="sum", per_sample_weights=scale, include_last_offset=True)
    return bags.to(y.dtype)  # [N, D]
