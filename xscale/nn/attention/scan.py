"""Attention without a softmax as sums of key-value products: chunks scanned in order (Katharopoulos et al. 2020).

Inside a chunk the products are masked, between chunks a state of [F, K] carries the past: linear in the length, and no
state is kept for each token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.nn.attention.sight import Sight

CHUNK = 64
"""Tokens of a chunk."""


@dataclass(frozen=True)
class Past:
    """What stands before a piece of a sequence."""

    states: Callable[[Tensor], Tensor]
    """As a sight's `before`."""
    document: Tensor | None
    """[B], of the token before the piece."""


def linear_attention(q: Tensor, k: Tensor, v: Tensor, sight: Sight, floor: float = 1e-6) -> Tensor:
    """sum_j (q_i . k_j) v_j / (sum_j q_i . k_j + floor) over the keys in sight.

    Features q [B, H, T, F] and k [B, G, S, F], values v [B, G, S, K] -> [B, H, T, K].
    """
    sums = linear_sums(q, k, F.pad(wide(v), (0, 1), value=1.0), sight)
    return (sums[..., :-1] / (sums[..., -1:] + floor)).to(v.dtype)


def wide(x: Tensor) -> Tensor:
    """Sums over a sequence are made in float32 at least."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def linear_sums(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
    """sum_j (q_i . k_j) v_j over the keys in sight: [B, H, T, K], float32 at least."""
    q, k, v = wide(q), wide(k), wide(v)
    batch, heads, queries, features = q.shape
    groups = k.shape[1]
    shape = (batch, groups, heads // groups, queries)
    q = q.reshape(*shape, features)
    if sight.causal:
        earlier = None if sight.before is None else Past(sight.before, sight.document_before)
        sums = _causal(q, k, v, sight.offset, sight.query_documents, sight.key_documents, earlier)
    elif sight.query_documents is None:
        sums = (q.flatten(2, 3) @ (k.mT @ v)).view(*shape, v.shape[-1])
    else:
        assert sight.key_documents is not None
        assert sight.queries == sight.keys, "documents of one sequence"
        # What stands before and what stands behind; the token itself is in both.
        forward = _causal(q, k, v, 0, sight.query_documents, sight.key_documents)
        turned = [x.flip(1) for x in (sight.query_documents, sight.key_documents)]
        backward = _causal(q.flip(3), k.flip(2), v.flip(2), 0, turned[0], turned[1]).flip(3)
        own = (q * k[:, :, None]).sum(-1, keepdim=True) * v[:, :, None]
        sums = forward + backward - own
    return sums.reshape(batch, heads, queries, -1)


def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offset: int,
    query_documents: Tensor | None,
    key_documents: Tensor | None,
    earlier: Past | None = None,
) -> Tensor:
    """q [B, G, R, T, F], k and v [B, G, S, ...] with S = offset + T -> [B, G, R, T, K]."""
    repeats, queries = q.shape[2:4]
    assert offset + queries == k.shape[2], "causal queries are the last of the keys"
    chunk = min(CHUNK, queries)
    before = k[:, :, :offset]
    documents, last = None, None
    if query_documents is not None:
        assert key_documents is not None
        documents = chunks(key_documents[:, offset:, None], 1, chunk, -1)[..., 0]  # [B, N, C]
        if offset:
            last = key_documents[:, offset - 1]  # [B]
            before = before * (key_documents[:, :offset] == last[:, None])[:, None, :, None]
    state = before.mT @ v[:, :, :offset]  # [B, G, F, K]
    if earlier is not None:
        assert offset == 0, "a piece knows the past as a state"
        state, last = earlier.states(_left(k, key_documents).mT @ v), earlier.document
    keys, values = (chunks(x[:, :, offset:], 2, chunk) for x in (k, v))  # [B, G, N, C, ...]
    rows = chunks(q, 3, chunk).transpose(2, 3).flatten(3, 4)  # [B, G, N, R*C, F]
    within = rows @ keys.mT  # [B, G, N, R*C, C]
    hidden = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    if documents is not None:
        hidden = hidden | (documents[:, :, :, None] != documents[:, :, None, :])  # [B, N, C, C]
        hidden = hidden[:, None]
    hidden = hidden.repeat(*(1,) * (hidden.ndim - 2), repeats, 1)
    past = _states(keys, values, state, documents, last)  # [B, G, N, F, K]
    carried = rows
    if documents is not None:
        carried = rows * _goes_on(documents, last).repeat(1, 1, repeats)[:, None, :, :, None]
    sums = within.masked_fill(hidden, 0) @ values + carried @ past  # [B, G, N, R*C, K]
    sums = sums.view(*sums.shape[:3], repeats, chunk, -1).transpose(2, 3).flatten(3, 4)
    return sums[:, :, :, :queries]


def _left(keys: Tensor, documents: Tensor | None) -> Tensor:
    """The keys [B, G, S, F] of each sequence's last document, zeros for the others."""
    return keys if documents is None else keys * (documents == documents[:, -1:])[:, None, :, None]


def _states(keys: Tensor, values: Tensor, first: Tensor, documents: Tensor | None, last: Tensor | None) -> Tensor:
    """The state that each chunk meets: of all chunks before it, or of the document in which the one before ended."""
    if documents is None:
        sums = keys[:, :, :-1].mT @ values[:, :, :-1]  # [B, G, N - 1, F, K]
        return torch.cat((first[:, :, None], sums), 2).cumsum(2)
    ends = documents[:, :, -1]  # [B, N]
    own = documents == ends[:, :, None]  # [B, N, C]
    sums = (keys * own[:, None, :, :, None]).mT @ values
    states, state = [first], first
    # Unbound at once: the backward of each index would fill the whole anew.
    for at, added in enumerate(sums.unbind(2)[:-1]):
        previous = last if at == 0 else ends[:, at - 1]
        same = torch.ones_like(ends[:, 0]) if previous is None else (previous == ends[:, at])
        state = state * same[:, None, None, None] + added
        states.append(state)
    return torch.stack(states, 2)


def _goes_on(documents: Tensor, last: Tensor | None) -> Tensor:
    """[B, N, C], true where a token's document is the one in which the chunk before ended."""
    ends = documents[:, :-1, -1]
    first = documents[:, :1, 0] if last is None else last[:, None]
    return documents == torch.cat((first, ends), 1)[:, :, None]


def chunks(x: Tensor, dim: int, size: int, value: int = 0) -> Tensor:
    """The axis `dim` cut into chunks of `size`, one axis becoming two, the last chunk filled up with `value`."""
    after = -x.shape[dim] % size
    if after:
        x = F.pad(x, (*(0, 0) * (x.ndim - 1 - dim), 0, after), value=value)
    return x.reshape(*x.shape[:dim], -1, size, *x.shape[dim + 1 :])


def scan_multiply_adds(queries: int, keys: int, features: int, width: int, causal: bool) -> float:
    """Multiply-adds of one head's `linear_sums`, with the column that adds up the weights."""
    width += 1
    if not causal:
        return float((queries + keys) * features * width)
    chunk = min(CHUNK, queries)
    return float(queries * chunk * (features + width) + (queries + keys) * features * width)
