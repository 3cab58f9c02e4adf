"""Dense softmax attention that materialises all scores, for cores that shorten the sequence first."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_softmax(
    scores: Tensor, hidden: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Softmax over the last axis; scores where `hidden` is true get weight 0, also in rows that are all hidden.

    `sinks` [H] are logits that the denominators of scores [B, H, T, S] have besides those of the keys.
    """
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        visible = None if hidden is None else F.pad(hidden, (0, 1), value=False)
        return masked_softmax(torch.cat((scores, column), -1), visible)[..., :-1]
    if hidden is None:
        return scores.softmax(-1)
    lowest = torch.finfo(scores.dtype).min
    return scores.masked_fill(hidden, lowest).softmax(-1).masked_fill(hidden, 0.0)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor | None = None,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(K)) v: q [B, H, T, K], k and v [B, G, S, K] -> [B, H, T, K]; softmax in float32 at least.

    `hidden` [B or 1, H or 1, T, S] is true where a query does not see a key. `drop` applies dropout to the weights.
    """
    scores = grouped_matmul(q, k.mT)
    scores = scores.float() if q.dtype in (torch.bfloat16, torch.float16) else scores
    weights = masked_softmax(scores * q.shape[-1] ** -0.5, hidden)
    return grouped_matmul((weights if drop is None else drop(weights)).to(v.dtype), v)


def grouped_matmul(x: Tensor, y: Tensor) -> Tensor:
    """x @ y for x [B, H, M, N] and y [B, G, N, P] -> [B, H, M, P]; each group of H/G heads shares one y."""
    batch, heads, rows, inner = x.shape
    if y.shape[1] == heads:
        return x @ y
    product = x.reshape(batch, y.shape[1], heads // y.shape[1] * rows, inner) @ y
    return product.view(batch, heads, rows, y.shape[-1])


def repeat_kv(x: Tensor, heads: int) -> Tensor:
    """Repeat each of the G kv_heads for its H/G query heads: [B, G, ...] -> [B, H, ...]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def upcast(x: Tensor) -> Tensor:
    """Cast bfloat16 and float16 to float32: sums over a sequence need float32 at least."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
