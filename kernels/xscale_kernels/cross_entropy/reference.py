"""The definition of cross_entropy in plain torch, differentiable as it stands."""

from __future__ import annotations

import torch

from xscale_kernels.cross_entropy.terms import Terms


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Each token's loss [N], in float32 at least. logits [N, V], targets [N]."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if terms.softcap:
        wide = terms.softcap * torch.tanh(wide / terms.softcap)
    kept = targets != terms.ignore_index
    lse = wide.logsumexp(1)  # [N]
    picked = wide.gather(1, targets.where(kept, 0)[:, None])[:, 0]
    loss = lse - (1 - terms.label_smoothing) * picked + terms.z_loss * lse.square()
    if terms.label_smoothing:
        loss = loss - terms.label_smoothing * wide.mean(1)
    return loss.where(kept, 0.0)
