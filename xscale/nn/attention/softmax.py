"""Vaswani et al. 2017, equation 1: softmax(q k^T / sqrt(K)) v, by torch's fused attention."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.dense import grouped_matmul, masked_softmax, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.ops.relative_blocks import relative_attention, uses_blocks
from xscale.nn.dims import Dims
from xscale.nn.position.distance_tables import DistanceTables
from xscale.nn.position.position import Position


@CORES.register(
    "softmax",
    traits=CoreTraits(
        causal=True,
        bidirectional=True,
        cross=True,
        per_head=True,
        cost="2*T*S*K",
        context=("ring", "ulysses"),
        dropout=True,
        bias=True,
        position_terms=True,
        documents=True,
        prefix=True,
        exact=True,
        decode=True,
    ),
)
class Softmax(Core):
    reads_bias: ClassVar[bool] = False
    """Whether the core reads the bias itself, which is then given by pair."""

    class Config(Core.Config):
        soft_cap: float | None = Field(default=None, gt=0)
        """Scores become cap * tanh(score / cap) (Gemma team 2024), by operators that keep all scores; null: no cap."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.soft_cap = config.soft_cap

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        terms, relative_bias = mask.position_terms, mask.relative_bias
        if relative_bias is not None:
            assert self._uses_blocks(q, k, mask), "see `prefers_relative_bias`"
            return relative_attention(
                q, k, v, mask, lambda distances: DistanceTables(bias=relative_bias(distances)), mask.bias_reach
            )
        tables = None if terms is None or not self._uses_blocks(q, k, mask) else terms.tables(q)
        if terms is not None and tables is not None:
            return relative_attention(q, k, v, mask, tables, terms.position.reach)
        if self.soft_cap is not None or mask.observed is not None or (terms is not None and terms.adds_values):
            # Operators that keep all scores, which may be capped and whose weights a position may read; and which know
            # queries without a key.
            return self.mix_values(self.attention_weights(q, k, mask), v, mask)
        dropout = mask.dropout if self.training else 0.0
        if mask.is_only_causal:
            return self.random.attention(q, k, v, dropout, is_causal=mask.causal)
        attn_mask = mask.allowed if mask.allowed is None else mask.allowed.to(q.device)
        bias = mask.score_bias(q, k)
        if bias is not None:
            bias = bias.to(q.dtype)
            attn_mask = bias if attn_mask is None else torch.where(attn_mask, bias, float("-inf"))
        return self.random.attention(q, k, v, dropout, attn_mask=attn_mask)

    def prefers_relative_bias(self, position: Position, q: Tensor, k: Tensor, mask: AttentionMask) -> bool:
        # torch's fused attention has no gradient of a bias on a CPU.
        return position.learns_relative_bias and not self.reads_bias and self._uses_blocks(q, k, mask)

    def _uses_blocks(self, q: Tensor, k: Tensor, mask: AttentionMask) -> bool:
        """Return whether to attend a block of queries at a time, where relative positions have terms of the scores."""
        dropout = mask.dropout if self.training else 0.0
        return self.soft_cap is None and not dropout and mask.bias is None and uses_blocks(q, k, mask)

    def attention_weights(self, q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor:
        """Return the weights [B, H, T, S] of queries and keys, before dropout, in float32 at least."""
        scores = upcast(grouped_matmul(q, k.mT)) * q.shape[-1] ** -0.5  # [B, H, T, S]
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        bias = mask.score_bias(q, k)
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        hidden = None if mask.allowed is None else ~mask.allowed.to(q.device)
        return masked_softmax(scores, hidden)

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        return 2.0 * heads * queries * keys * head_width / (2 if self.causal else 1)
