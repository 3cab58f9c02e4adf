"""Vaswani et al. 2017, equation 1: softmax(q k^T / sqrt(K)) v, by torch's fused attention or FlexAttention.

With `sinks` each head h has a learned logit s_h in the denominator (OpenAI 2025, gpt-oss; after the attention sinks of
Xiao et al. 2023), so that its weights sum to less than 1:

    w_ij = exp(score_ij) / (exp(s_h) + sum_l exp(score_il))
"""

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from xscale.core.config import PositiveFloat
from xscale.core.errors import ConfigError, Problem
from xscale.nn.attention.core import CORES, SCORES, Core, CoreTraits
from xscale.nn.attention.ops.dense import grouped_matmul, masked_softmax, upcast
from xscale.nn.attention.ops.flex import KERNEL_BLOCK, FlexAttention, KeyBlocks
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.ops.relative_blocks import relative_attention, uses_blocks
from xscale.nn.dims import Dims
from xscale.nn.position.distance_tables import DistanceTables
from xscale.nn.position.position import POSITIONS, Position
from xscale_kernels.packed_attention import (
    COMPILED,
    library_refusals,
    packed_attention,
    runs_compiled,
)
from xscale_kernels.select import log_choice

LEAST_PACKED = 512
"""Packed sequences of more tokens are attended a block of queries at a time on a CPU; the mask of others is small."""


@CORES.register(
    "softmax",
    traits=replace(SCORES, context=("ring", "ulysses"), exact=True, static_decode=True),
)
class Softmax(Core):
    reads_bias: ClassVar[bool] = False
    """Whether the core reads the bias itself, which is then given by pair."""

    class Config(Core.Config):
        sinks: bool = False
        """Whether each head has a learned logit in the softmax's denominator, an attention sink (gpt-oss), which starts
        at 0. By flex, or by operators that keep all scores."""
        soft_cap: PositiveFloat | None = None
        """Scores become cap * tanh(score / cap) (Gemma team 2024), by flex or by operators that keep all
        scores; null: no cap."""
        implementation: Literal["auto", "dense", "flex"] = "auto"
        """dense: torch's fused attention, a block of queries at a time in packed documents on a CPU, or operators that
        keep all scores where they are capped, have sinks, or a position adds to the values; flex: FlexAttention, which
        takes a bias, a bias by distance as a table, and a position's terms of the scores by distance (others are
        refused), skips blocks of other documents, and has no gradients on a CPU; auto: on CUDA flash-attn or torch's
        varlen_attn where only packed documents and causal order hide keys, in half precision, without a cap or sinks
        (under torch.compile torch's, in its graphs); flex where documents are packed otherwise, where scores have
        sinks, where a position adds a bias by distance, or terms of the scores that tell fewer distances apart than
        there are keys; else dense. kernels.packed_attention names the first of these. Dropout, decoding,
        cross-attention and prefixes always use dense, whose mask of packed documents is [B, 1, T, T]; the ring of
        context parallelism has operators of its own."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.soft_cap = config.soft_cap
        self.implementation = config.implementation
        self._flex = FlexAttention(KERNEL_BLOCK, config.soft_cap)
        if config.sinks:
            self.declare_sinks(heads)

    @classmethod
    def traits_of(cls, config: Any) -> CoreTraits:
        declared = CORES.get(str(cls.Config.kind)).traits
        return replace(declared, exact=declared.exact and not config.sinks)

    @property
    def traits(self) -> CoreTraits:
        declared = CORES.get(str(self.Config.kind)).traits
        return replace(declared, exact=declared.exact and self.sinks is None)

    @classmethod
    def check(cls, config: Any, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        if getattr(config, "implementation", None) == "flex":
            problems += FlexAttention.check_position(dims, path, "auto", "dense")
        return problems

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        if self._uses_packed_kernel(q, k, v, mask):
            assert mask.query_documents is not None
            return packed_attention(
                *(q, k, v, mask.query_documents),
                causal=mask.causal,
                implementation=COMPILED
                if torch.compiler.is_compiling()
                else self.kernel_choices.get("packed_attention"),
                spans=mask.document_spans,
            )
        if self._uses_flex(q, mask):
            blocks = mask.derive(
                f"key_blocks/{q.device}", lambda: KeyBlocks.of_mask(mask, q.device)
            )
            return self._flex.attend(q, k, v, mask, blocks, self.sink_logits())
        terms, relative_bias = mask.position_terms, mask.relative_bias
        if relative_bias is not None:
            assert self._uses_blocks(q, k, mask), "see `prefers_relative_bias`"
            return relative_attention(
                q,
                k,
                v,
                mask,
                lambda distances: DistanceTables(bias=relative_bias(distances)),
                mask.bias_reach,
            )
        tables = None if terms is None or not self._uses_blocks(q, k, mask) else terms.tables(q)
        if terms is not None and tables is not None:
            return relative_attention(q, k, v, mask, tables, terms.position.reach)
        adds_values = terms is not None and terms.adds_values
        if (
            self.soft_cap is not None
            or self.sinks is not None
            or mask.observed is not None
            or adds_values
        ):
            # Operators that keep all scores, which may be capped or have sinks, and whose weights a position may read;
            # and which know queries without a key.
            return self.mix_values(self.attention_weights(q, k, mask), v, mask)
        dropout = mask.dropout if self.training else 0.0
        if mask.is_only_causal:
            return self.random.attention(q, k, v, dropout, is_causal=mask.causal)
        if mask.query_documents is not None and _is_long_and_packed(q, v, mask, dropout):
            kernel = self.kernel_choices.get("packed_attention")
            documents = mask.query_documents.to(q.device)
            return packed_attention(q, k, v, documents, causal=mask.causal, implementation=kernel)
        attn_mask = mask.allowed if mask.allowed is None else mask.allowed.to(q.device)
        bias = mask.score_bias(q, k)
        if bias is not None:
            bias = bias.to(q.dtype)
            attn_mask = bias if attn_mask is None else torch.where(attn_mask, bias, float("-inf"))
        return self.random.attention(q, k, v, dropout, attn_mask=attn_mask)

    def prefers_relative_bias(
        self, position: Position, q: Tensor, k: Tensor, mask: AttentionMask
    ) -> bool:
        relative = POSITIONS.get(str(position.Config.kind)).traits.relative
        if self.reads_bias or not (position.adds_bias and relative):
            return False
        if self._uses_flex(q, mask.with_relative_bias(position)):
            return True
        # torch's fused attention has no gradient of a bias on a CPU.
        return position.learns_relative_bias and self._uses_blocks(q, k, mask)

    def _uses_packed_kernel(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> bool:
        """Return whether an implementation of packed_attention for a GPU attends, in place of FlexAttention."""
        dropout, named = (
            mask.dropout if self.training else 0.0,
            "packed_attention" in self.kernel_choices,
        )
        changes_scores = self.soft_cap is not None or self.sinks is not None
        if (
            self.implementation == "flex"
            or changes_scores
            or not (q.is_cuda and _is_packed(mask, dropout))
        ):
            return False
        if torch.compiler.is_compiling():
            # Spans that are not there yet would be found in the graph, which depends on them then.
            chosen = named or self.implementation != "dense"
            return chosen and mask.spans is not None and runs_compiled(q, k, v)
        if named or self.implementation == "dense":
            return named
        refused = library_refusals(q, k, v)
        if refused is not None:
            log_choice("packed_attention", "flex", refused)
        return refused is None

    def _uses_flex(self, q: Tensor, mask: AttentionMask) -> bool:
        dropout, terms = mask.dropout if self.training else 0.0, mask.position_terms
        if self.implementation == "dense" or dropout or mask.queries != mask.keys:
            return False
        if mask.key_prefix is not None or mask.observed is not None:
            return False
        reason = self._flex.why_not_terms(q, mask) or self._flex.why_unsupported(q)
        if self.implementation == "flex":
            if reason is not None:
                fix = "Take auto or dense."
                raise ConfigError(
                    "core.implementation", f"flex does not support this call: {reason}", fix
                )
            return True
        if not q.is_cuda or reason is not None or mask.bias is not None:
            return False
        if terms is not None:
            # The tables have a column for each distance, for each query or key.
            reach = terms.position.reach
            return reach is not None and reach * (1 if mask.causal else 2) < mask.keys
        return (
            self.sinks is not None
            or mask.relative_bias is not None
            or mask.query_documents is not None
        )

    def _uses_blocks(self, q: Tensor, k: Tensor, mask: AttentionMask) -> bool:
        """Return whether to attend a block of queries at a time, where relative positions have terms of the scores."""
        dropout = mask.dropout if self.training else 0.0
        changes_scores = self.soft_cap is not None or self.sinks is not None
        return not changes_scores and not dropout and mask.bias is None and uses_blocks(q, k, mask)

    def attention_weights(self, q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor:
        """Return the weights [B, H, T, S] of queries and keys, before dropout, in float32 at least.

        With sinks those of a query sum to less than 1.
        """
        scores = upcast(grouped_matmul(q, k.mT)) * q.shape[-1] ** -0.5  # [B, H, T, S]
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        bias = mask.score_bias(q, k)
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        hidden = None if mask.allowed is None else ~mask.allowed.to(q.device)
        return masked_softmax(scores, hidden, self.sink_logits())

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        # The queries are the last tokens, and all of them see the keys before.
        seen = queries * (keys - queries / 2) if self.causal else queries * keys
        return 2.0 * heads * seen * head_width


def _is_packed(mask: AttentionMask, dropout: float) -> bool:
    """Return whether there are packed documents, and only they, and causal order, hide keys of a sequence from it."""
    is_biased = any(
        bias is not None for bias in (mask.bias, mask.relative_bias, mask.position_terms)
    )
    is_cut = (
        mask.key_prefix is not None
        or mask.observed is not None
        or mask.query_documents is not mask.key_documents
    )
    is_packed = mask.query_documents is not None and mask.queries == mask.keys
    return is_packed and not (is_biased or is_cut or dropout)


def _is_long_and_packed(q: Tensor, v: Tensor, mask: AttentionMask, dropout: float) -> bool:
    """Return whether only documents, and causal order, hide keys of a long sequence on a CPU from itself."""
    is_long = mask.keys > LEAST_PACKED and q.device.type == "cpu" and v.shape[-1] == q.shape[-1]
    return is_long and _is_packed(mask, dropout)
