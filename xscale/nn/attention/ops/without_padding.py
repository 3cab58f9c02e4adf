"""Attention of padded samples by cores that cannot hide keys: those of one length go together, without their padding.

Each sample has the numbers that it has alone, whatever the core does along the sequence.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.compiling.eager import eager

L = TypeVar("L", int, tuple[int, int])
Attend = Callable[[Tensor, Tensor, Tensor, AttentionMask], Tensor]


def attend_text(attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """Attend by `attend`, a core: as it is where it hides padding, else without padding."""
    if mask.key_padding is None or mask.hides_padding:
        return attend(q, k, v, mask)
    return attend_without_padding(attend, q, k, v, mask)


@eager
def attend_without_padding(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
) -> Tensor:
    """Attend by `attend`, q [B, H, T, K], k and v [B, G, S, K] -> [B, H, T, K], zero at padding.

    `mask.key_padding` and `mask.query_padding` tell where samples end.
    """
    assert mask.position_terms is None, "a core with position terms hides keys"
    assert mask.cache is None, "there is no padding in generation"
    out, groups = torch.zeros_like(q), samples_by_length(mask.lengths)
    for (queries, keys), rows in groups.items():
        index = torch.tensor(rows, device=q.device)
        part = replace(
            mask,
            queries=queries,
            keys=keys,
            key_padding=None,
            query_padding=None,
            query_documents=None,
            key_documents=None,
            spans=None,
            observed=None if mask.observed is None else mask.observed[index, :queries, :keys],
            bias=None
            if mask.bias is None
            else mask.bias.expand(len(q), -1, -1, -1)[index, :, :queries, :keys],
            # Each call attaches losses and adds statistics.
            aux_loss_weight=None
            if mask.aux_loss_weight is None
            else mask.aux_loss_weight / len(groups),
        )
        o = attend(q[index, :, :queries], k[index, :, :keys], v[index, :, :keys], part)
        full = torch.zeros_like(q[index]).index_copy(2, torch.arange(queries, device=q.device), o)
        out = out.index_copy(0, index, full)
    return out


def samples_by_length(lengths: list[L]) -> dict[L, list[int]]:
    """Length -> indices of the samples that have it, in rising order of the lengths."""
    samples: dict[L, list[int]] = {}
    for index, length in enumerate(lengths):
        samples.setdefault(length, []).append(index)
    return dict(sorted(samples.items()))
