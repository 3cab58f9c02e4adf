"""The definition of linear_attention, token by token; differentiable as it stands."""

from __future__ import annotations

import torch

from xscale_kernels.rows import wide


def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor | None,
    documents: torch.Tensor | None,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """S_t = exp(g_t) [same document] S_{t-1} + k_t v_t^T and o_t = q_t S_t. Shapes as in op.py."""
    B, H, T, K = q.shape
    compute = wide(q.dtype)
    rows, keys, values = (each.to(compute) for each in (q, k, v))
    carry = rows.new_zeros(B, H, K, v.shape[3]) if state is None else state.to(compute)
    out = []
    for t in range(T):
        if log_decay is not None:
            carry = carry * log_decay[:, :, t, None, None].to(compute).exp()
        if documents is not None and t:
            carry = carry * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        carry = carry + keys[:, :, t, :, None] * values[:, :, t, None, :]
        out.append((rows[:, :, t, None, :] @ carry)[:, :, 0])
    result = torch.stack(out, 2) if out else v.new_zeros(B, H, 0, v.shape[3], dtype=compute)
    return result.to(v.dtype), carry
