"""The definition of the local parts of a vocabulary-parallel loss, with all local logits at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from xscale_kernels.linear_cross_entropy.result import Gradients
from xscale_kernels.vocab_cross_entropy.share import Share, Three


def _logits(share: Share) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Capped logits [N, V_local] in float32 at least, and the cap's slope."""
    logits = F.linear(share.hidden, share.weight, share.bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    cap = share.terms.softcap
    if not cap:
        return logits, None
    squashed = torch.tanh(logits / cap)
    return cap * squashed, 1 - squashed.square()


def _pull(share: Share, like: torch.Tensor) -> torch.Tensor:
    """[N, V_local]: 1 at a token's target where that is here."""
    words = torch.arange(share.first, share.first + like.shape[1], device=like.device)
    return ((share.targets[:, None] == words) & share.counted[:, None]).to(like.dtype)


def statistics(share: Share) -> Three:
    """lse, picked and total."""
    logits, _ = _logits(share)
    picked = (logits * _pull(share, logits)).sum(1)
    total = logits.sum(1) if share.terms.label_smoothing else torch.zeros_like(picked)
    return logits.logsumexp(1).where(share.counted, 0), picked, total.where(share.counted, 0)


def gradients(share: Share, lse: torch.Tensor, seed: torch.Tensor, words: int) -> Gradients:
    """Of sum(seed * loss), through this rank's words; lse [N] is combined over the ranks."""
    (logits, slope), terms, kept = _logits(share), share.terms, share.counted
    scale = torch.where(kept, seed.to(lse.dtype), 0)[:, None]
    lse = lse.where(kept, 0)[:, None]
    out = (logits - lse).exp() * (1 + 2 * terms.z_loss * lse)
    out = out - (1 - terms.label_smoothing) * _pull(share, logits) - terms.label_smoothing / words
    out = (out * scale).where(kept[:, None], 0)
    narrow = (out if slope is None else out * slope).to(share.hidden.dtype)
    dbias = None if share.bias is None else narrow.sum(0).to(share.bias.dtype)
    return Gradients(narrow @ share.weight, narrow.t() @ share.hidden, dbias)
