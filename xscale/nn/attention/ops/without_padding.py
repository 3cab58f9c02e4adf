"""Attention of padded samples by cores that cannot hide keys: those of one length go together, without their padding.

Each sample has the numbers that it has alone, whatever the core does along the sequence.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.eager import eager

Attend = Callable[[Tensor, Tensor, Tensor, AttentionMask], Tensor]


@eager
def attend_without_padding(attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """Attend by `attend`, q [B, H, T, K], k and v [B, G, S, K] -> [B, H, T, K], zero at the padding of self-attention.

    `mask.key_padding` tells where each sample's keys end.
    """
    assert mask.position_terms is None, "a core with position terms hides keys"
    assert mask.cache is None, "there is no padding in generation"
    out = torch.zeros_like(q)
    for length, rows in samples_by_length(mask.key_lengths).items():
        index = torch.tensor(rows, device=q.device)
        queries = mask.queries if mask.query_padding is None else length
        part = replace(
            mask,
            queries=queries,
            keys=length,
            key_padding=None,
            query_padding=None,
            observed=None if mask.observed is None else mask.observed[index, :queries, :length],
            bias=None if mask.bias is None else mask.bias.expand(len(q), -1, -1, -1)[index, :, :queries, :length],
        )
        o = attend(q[index, :, :queries], k[index, :, :length], v[index, :, :length], part)
        # Not written into `out`, which autocast and autograd may read.
        full = torch.zeros_like(q[index]).index_copy(2, torch.arange(queries, device=q.device), o)
        out = out.index_copy(0, index, full)
    return out


def samples_by_length(lengths: list[int]) -> dict[int, list[int]]:
    """Length -> indices of the samples that have it, in rising order, without empty samples."""
    samples: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        if length:
            samples.setdefault(length, []).append(index)
    return dict(sorted(samples.items()))
