"""Sukhbaatar et al. 2019 (all-attention), section 4: learned keys and values beside those of the sequence.

    o_t = softmax([q_t K_s^T + bias, q_t K_p^T] / sqrt(K)) [V_s; V_p]

Each head has N persistent vectors K_p, V_p [N, K], which every token sees whatever the mask, and to which no position
is added. A feed-forward layer with a softmax in place of its ReLU is attention to such vectors, so that a block with
them needs no feed-forward layer (`ffn: none`).
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveInt
from xscale.nn.attention.core import CORES, SCORES, Core
from xscale.nn.attention.ops.dense import repeat_kv, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.init import Init


@CORES.register(
    "persistent_memory",
    traits=replace(SCORES, normalised=False, cost="2*T*(S + persistent)*K"),
    deviations=(
        "The persistent vectors start with the paper's variances, 1/K and 1/N; the authors' code learns them at "
        "variance 1 times those factors, which makes an optimizer's step on them larger.",
    ),
)
class PersistentMemory(Core):
    memory_keys: Parameter
    memory_values: Parameter

    class Config(Core.Config):
        persistent: PositiveInt = 1024
        """N, persistent vectors of each head; the paper takes as many as a feed-forward layer has hidden units."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.persistent = config.persistent
        shape = (heads, config.persistent, head_width)
        self.declare("memory_keys", shape, ("heads", "state", "state"), Init(std=head_width**-0.5))
        self.declare(
            "memory_values", shape, ("heads", "state", "state"), Init(std=config.persistent**-0.5)
        )

    @classmethod
    def example(cls) -> "PersistentMemory.Config":
        return cls.Config(persistent=24)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        keys, values = (
            torch.cat(
                (
                    self.use(memory).to(x.dtype).expand(q.shape[0], -1, -1, -1),
                    repeat_kv(x, q.shape[1]),
                ),
                2,
            )
            for memory, x in ((self.memory_keys, k), (self.memory_values, v))
        )  # [B, H, N + S, K]
        added = self._extended(q, k, mask)
        terms = mask.position_terms
        if terms is not None and terms.adds_values:
            assert added is not None
            scores = upcast(q @ keys.mT) * q.shape[-1] ** -0.5
            weights = self.drop_weights((scores + added).softmax(-1), mask).to(v.dtype)
            return weights @ values + terms.values(weights[..., self.persistent :])
        dropout = mask.dropout if self.training else 0.0
        return self.random.attention(q, keys, values, dropout, attn_mask=added)

    def _extended(self, q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor | None:
        """Return the mask, bool or added to the scores, [B or 1, 1 or H, T, N + S]; None: all see all."""
        allowed = None if mask.allowed is None else mask.allowed.to(q.device)
        bias = mask.score_bias(q, k)
        if bias is None:
            if allowed is None:
                return None
            return torch.cat((allowed.new_ones(*allowed.shape[:3], self.persistent), allowed), 3)
        bias = bias.to(q.dtype)
        if allowed is not None:
            bias = torch.where(allowed, bias, float("-inf"))
        return torch.cat((bias.new_zeros(*bias.shape[:3], self.persistent), bias), 3)

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        seen = keys / (2 if self.causal else 1) + self.persistent
        return 2.0 * heads * queries * seen * head_width
