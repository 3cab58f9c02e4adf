"""unpermute on the CPU: rows sorted by token and summed with embedding_bag, which is faster than index_add."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from xscale_kernels.permute.op import sorted_rows
from xscale_kernels.rows import row_blocks, wide


def unpermute(
    y: torch.Tensor,
    tokens: torch.Tensor,
    weights: torch.Tensor | None,
    N: int,
    token_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """CPU implementation of `reference_unpermute`."""
    if y.shape[0] == 0:
        return y.new_zeros(N, y.shape[1])
    compute = wide(y.dtype)
    if N == 1:
        # One token, as in generation: its weights times its rows.
        factors = (
            y.new_ones(1, len(y), dtype=compute) if weights is None else weights.to(compute)[None]
        )
        return (factors @ y.to(compute)).to(y.dtype)
    order, starts = sorted_rows(tokens, N, token_rows)
    scale = None if weights is None else weights.to(compute).index_select(0, order)
    bags = F.embedding_bag(
        order, y.to(compute), starts, mode="sum", per_sample_weights=scale, include_last_offset=True
    )
    return bags.to(y.dtype)  # [N, D]


def spread(
    dout: torch.Tensor, y: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """CPU implementation of `reference_spread`."""
    compute = wide(y.dtype)
    dy, dweights = (
        torch.empty_like(y, memory_format=torch.contiguous_format),
        torch.empty_like(weights),
    )
    scale = weights.to(compute)
    for span in row_blocks(dy):
        rows = dout.index_select(0, tokens[span]).to(compute)
        # Multiply and sum: vecdot takes four times as long on CPU.
        dweights[span] = (rows * y[span]).sum(1)
        if dy.dtype == compute:
            torch.mul(rows, scale[span, None], out=dy[span])
        else:
            dy[span] = rows.mul_(scale[span, None])
    return dy, dweights
