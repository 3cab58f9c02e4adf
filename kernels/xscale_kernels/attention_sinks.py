"""Attention sinks (OpenAI 2025, gpt-oss): a logit of each head in the softmax's denominator, added after the attention.

With the output o_i and the log-sum-exp l_i of the scores z_ij of query i, a sink s gives

    o'_i = o_i sigmoid(l_i - s)    l'_i = log(exp(l_i) + exp(s))

as the weights are exp(z_ij - l'_i). Backward by recomputation (Dao et al. 2022) then needs nothing new: from o' and l'
in place of o and l it computes the gradients of q, k and v. The sink itself has the weight exp(s - l'_i) and no value.
"""

from __future__ import annotations

import math

import torch

NATURAL, BINARY = 1.0, math.log(2)
"""Units of a log-sum-exp in nats: log sum exp, log2 sum exp2."""


def add_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, unit: float = NATURAL
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [B, H, T, M] and the log-sum-exp [B, H, T], in its unit, with the logits `sinks` [H] in nats.

    A query that sees no key, with an output of 0 and a log-sum-exp of +inf or -inf, keeps the output of 0.
    """
    logits = (sinks / unit).to(lse.dtype)[None, :, None]
    share = torch.sigmoid((lse - logits) * unit)  # [B, H, T]
    total = (torch.logaddexp if unit == NATURAL else torch.logaddexp2)(lse, logits.expand_as(lse))
    return (out * share[..., None]).to(out.dtype), total


def gradient_of_sinks(
    sinks: torch.Tensor,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    unit: float = NATURAL,
) -> torch.Tensor:
    """Return the gradient of the logits `sinks` [H] from that of the output, both [B, H, T, M].

    `out` and `lse` [B, H, T], in its unit, are those with the sinks: see `add_sinks`.
    """
    dot = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)  # [B, H, T]
    weights = (sinks.to(lse.dtype)[None, :, None] - lse * unit).exp()
    return -(weights * dot).sum((0, 2)).to(sinks.dtype)
