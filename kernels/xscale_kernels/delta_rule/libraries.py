"""delta_rule by flash-linear-attention (Yang and Zhang 2024), whose chunks are computed in parallel.

Its kernels (fla.ops.gated_delta_rule.chunk) are tested in Triton's interpreter; not run on hardware yet.
"""

from __future__ import annotations

import torch


def fla_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    strength: torch.Tensor,
    log_decay: torch.Tensor | None,
    documents: torch.Tensor | None,
    state: torch.Tensor | None,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `chunked.scan` without documents, in chunks of 64 tokens, whatever `chunk` is; the backward is fla's."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    assert documents is None
    # Its tensors are [B, T, H, K], its gates [B, T, H] logarithms, and its states [B, H, K, M] in float32.
    decay = torch.zeros_like(strength) if log_decay is None else log_decay
    out, last = chunk_gated_delta_rule(
        *(x.transpose(1, 2).contiguous() for x in (q, k, v)),
        g=decay.float().transpose(1, 2).contiguous(),
        beta=strength.to(q.dtype).transpose(1, 2).contiguous(),
        scale=1.0,
        initial_state=None if state is None else state.float().contiguous(),
        output_final_state=True,
    )
    return out.transpose(1, 2).contiguous(), last
