"""Tay et al. 2019 (Quaternion Transformer), section 3: attention by the Hamilton product of queries and keys.

    E = Q (x) K / sqrt(K),  o = [softmax(E_r) v_r; softmax(E_i) v_i; softmax(E_j) v_j; softmax(E_k) v_k]

The channels of a head are four quarters (r, i, j, k). Each of the four matrices of scores sums four products of
quarters: E_r = q_r k_r - q_i k_i - q_j k_j - q_k k_k, and so on. So each is a product of the keys with queries whose
quarters change places and signs, and the four are heads of an attention of their own.
"""

from typing import Any

import torch
from torch import Tensor

from xscale.core.errors import Problem
from xscale.core.requirements import kinds
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.dense import repeat_kv
from xscale.nn.attention.ops.mask import AttentionMask

COMPONENTS = 4


def hamilton_rows(quaternion: Tensor, dim: int) -> list[Tensor]:
    """Return W_r, W_i, W_j and W_k, whose quarters lie along `dim`, such that W_c . x is component c of W (x) x."""
    r, i, j, k = quaternion.chunk(COMPONENTS, dim)
    rows = ((r, -i, -j, -k), (i, r, -k, j), (j, k, r, -i), (k, -j, i, r))
    return [torch.cat(row, dim) for row in rows]


@CORES.register(
    "hamilton",
    traits=CoreTraits(
        causal=True,
        bidirectional=True,
        cross=True,
        per_head=True,
        cost="5*T*S*K",
        context=("ulysses",),
        bias=True,
        documents=True,
        decode=True,
    ),
)
class Hamilton(Core):
    @classmethod
    def check_head_width(cls, config: Any, head_width: int, path: str) -> list[Problem]:
        if head_width % COMPONENTS == 0:
            return []
        what = f"a head's {head_width} channels have no four quarters"
        fix = "Or take heads with a multiple of 4 channels."
        return [Problem(path, what, fix, choices=kinds(["softmax"], path))]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        heads = q.shape[1]
        queries = torch.stack(hamilton_rows(q, 3), 2).flatten(1, 2)  # [B, 4H, T, K]
        keys = repeat_kv(k, heads).repeat_interleave(COMPONENTS, 1)  # [B, 4H, S, K]
        quarters = repeat_kv(v, heads).reshape(*v.shape[:1], heads, v.shape[2], COMPONENTS, -1)
        values = quarters.transpose(2, 3).flatten(1, 2)  # [B, 4H, S, K/4]
        allowed = None if mask.allowed is None else mask.allowed.to(q.device)
        added, bias = allowed, mask.score_bias(q, k)
        if bias is not None:
            bias = bias.to(q.dtype)
            added = bias if allowed is None else torch.where(allowed, bias, float("-inf"))
        if added is not None and added.shape[1] > 1:
            added = added.repeat_interleave(COMPONENTS, 1)
        o = self.random.attention(queries, keys, values, 0.0, attn_mask=added)
        return (
            o.view(len(o), heads, COMPONENTS, *o.shape[2:]).transpose(2, 3).flatten(3)
        )  # [B, H, T, K]

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        return 5.0 * heads * queries * keys * head_width / (2 if self.causal else 1)
