"""linear_attention by flash-linear-attention (Yang and Zhang 2024), whose chunks are computed in parallel.

Its kernels (fla.ops.simple_gla.chunk) are tested in Triton's interpreter; not run on hardware yet.
"""

from __future__ import annotations

import torch


def fla_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor | None,
    documents: torch.Tensor | None,
    state: torch.Tensor | None,
    reverse: bool,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `chunked.scan` without documents, in chunks of 64 tokens, whatever `chunk` is."""
    from fla.ops.simple_gla import chunk_simple_gla

    assert documents is None
    if reverse:
        if log_decay is not None:
            # In reverse, the state decays by the next token's gate; the last token has none.
            log_decay = torch.cat(
                (log_decay[..., 1:], torch.zeros_like(log_decay[..., :1])), -1
            ).flip(2)
        q, k, v = (x.flip(2) for x in (q, k, v))
    # Its tensors are [B, T, H, K], its gates [B, T, H] logarithms, and its states [B, H, K, M] in float32.
    out, last = chunk_simple_gla(
        *(x.transpose(1, 2).contiguous() for x in (q, k, v)),
        g=None if log_decay is None else log_decay.float().transpose(1, 2).contiguous(),
        scale=1.0,
        initial_state=None if state is None else state.float().contiguous(),
        output_final_state=True,
    )
    out = out.transpose(1, 2)
    return (out.flip(2) if reverse else out).contiguous(), last
