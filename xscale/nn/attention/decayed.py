"""Linear attention whose past fades: S_t = exp(d_t) S_(t-1) + k_t v_t^T, scanned by chunks (Yang et al. 2024, GLA)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.nn.attention.scan import chunks
from xscale.nn.attention.sight import Sight

CHUNK = 64


def decayed_sums(q: Tensor, k: Tensor, v: Tensor, log_keep: Tensor, sight: Sight) -> Tensor:
    """sum over j <= i of exp(d_(j+1) + ... + d_i) (q_i . k_j) v_j, causal.

    Features q [B, H, T, F], k [B, H, S, F], v [B, H, S, K], d = log_keep [B, H, S] <= 0 -> [B, H, T, K].
    """
    assert sight.causal
    queries, offset = q.shape[2], sight.offset
    # Earlier tokens have no query of their own here; a chunked scan from the start serves them all.
    q = F.pad(q, (0, 0, offset, 0))
    if sight.key_documents is not None:
        fresh = torch.ones_like(sight.key_documents, dtype=torch.bool)
        fresh[:, 1:] = sight.key_documents[:, 1:] != sight.key_documents[:, :-1]
        run = fresh.cumsum(1)  # [B, S]
    else:
        run = torch.zeros(q.shape[0], q.shape[2], dtype=torch.long, device=q.device)
    q, k, v = (chunks(x, 2, CHUNK) for x in (q, k, v))
    decay = chunks(log_keep, 2, CHUNK).cumsum(-1)  # [B, H, N, C]
    run = chunks(run, 1, CHUNK, -1)[:, None]
    apart = run[..., :, None] != run[..., None, :]  # [B, 1, N, C, C]
    hidden = apart | torch.ones_like(apart).triu(1)
    fade = (decay[..., :, None] - decay[..., None, :]).masked_fill(hidden, float("-inf")).exp()
    within = (q @ k.mT * fade) @ v  # [B, H, N, C, K]
    rest = (decay[..., -1:] - decay).exp() * (run == run[..., -1:])  # what of each key is left at the chunk's end
    sums = (k * rest[..., None]).mT @ v  # [B, H, N, F, K]
    state = torch.zeros_like(sums[:, :, 0])
    states, ended = [], run[:, :, 0, 0]
    met = []
    # Unbound at once: the backward of each index would fill the whole anew.
    kept = decay[..., -1].exp().unbind(2)  # [B, H]
    for at, added in enumerate(sums.unbind(2)):
        states.append(state)
        met.append(run[:, :, at] == ended[..., None])  # [B, 1, C]
        goes_on = (run[:, :, at, -1] == ended)[..., None, None]
        state = state * kept[at][..., None, None] * goes_on + added
        ended = run[:, :, at, -1]
    carried = q * (decay.exp() * torch.stack(met, 2))[..., None]
    total = within + carried @ torch.stack(states, 2)
    out: Tensor = total.flatten(2, 3)[:, :, offset : offset + queries]
    return out
