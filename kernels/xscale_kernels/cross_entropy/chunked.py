"""cross_entropy in torch, a block of rows at a time, so that nothing of the logits' size is saved for the backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from xscale_kernels.cross_entropy.inplace import fold_, gradient_, refold_
from xscale_kernels.cross_entropy.op import LossTerms


def _spans(logits: torch.Tensor) -> Iterator[slice]:
    # A block of 4 MB stays in a core's cache between the passes; a GPU prefers few launches.
    budget = 2**20 if logits.device.type == "cpu" else 2**26
    rows = max(1, budget // max(logits.shape[1], 1))
    return (slice(start, start + rows) for start in range(0, logits.shape[0], rows))


def forward(
    logits: torch.Tensor, targets: torch.Tensor, terms: LossTerms
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's loss [N] and lse [N], in float32 at least. logits: [N, V]. targets: [N]."""
    compute = torch.promote_types(logits.dtype, torch.float32)
    loss, lse = (logits.new_empty(logits.shape[0], dtype=compute) for _ in range(2))
    kept = targets != terms.ignore_index
    safe = targets.where(kept, 0)
    for span in _spans(logits):
        folded = fold_(logits[span].to(compute, copy=True), safe[span], terms)
        loss[span], lse[span] = folded.loss, folded.lse
    return loss.where(kept, 0.0), lse


def backward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    seed: torch.Tensor,
    terms: LossTerms,
) -> torch.Tensor:
    """The gradient [N, V] of sum(seed * loss)."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    kept = targets != terms.ignore_index
    safe = targets.where(kept, 0)
    seed = seed.to(lse.dtype).where(kept, 0.0)
    for span in _spans(logits):
        block = (
            out[span]
            if out.dtype == lse.dtype
            else logits.new_empty(out[span].shape, dtype=lse.dtype)
        )
        block.copy_(logits[span])
        folded = refold_(block, lse[span], terms)
        gradient_(block, folded, safe[span], seed[span], terms)
        if block.dtype != out.dtype:
            out[span] = block
    # An ignored token's logits may be infinite or NaN; zero times that is not zero.
    return out.masked_fill_(~kept[:, None], 0)
