"""Attention masks over a sharded sequence: of a shard's queries, and of all queries on all keys."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from xscale.nn.attention.ops.mask import OBSERVED, AttentionMask
from xscale.nn.position.pairs import Pairs
from xscale.nn.position.position import Position
from xscale.nn.tokens import Tokens
from xscale.parallel.context.attention import ShardedAttention
from xscale.parallel.context.sequence_sharding import SequenceSharding, TokenShard


@dataclass(frozen=True, kw_only=True)
class ShardedAttentionMask(AttentionMask):
    """Mask of a rank's P queries; `queries` and `keys` count local tokens, the rules refer to the full sequences."""

    query_shard: TokenShard
    """Tokens of the queries."""
    key_shard: TokenShard
    """Tokens of the keys."""
    documents: bool = False
    """Whether documents are masked from each other."""
    position: Position | None = None
    """Position encoding that biases the scores; None: no bias."""
    pairs: Pairs | None = None
    """All queries and keys, for a position whose terms read them; None: it has none."""
    projections: tuple[nn.Module | None, ...] = ()
    """The modules that `pairs.project` reads."""
    uses_relative_bias: bool = False
    """Whether the core takes the bias by distance."""
    reads_bias: bool = False
    """Whether the mixer reads the bias by pair."""

    @property
    def sharding(self) -> SequenceSharding:
        """How the sequences are sharded over cp."""
        return self.query_shard.sharding

    def full(
        self,
        first_head: int,
        heads: int,
        prefers_relative_bias: Callable[[Position, AttentionMask], bool],
    ) -> AttentionMask:
        """Return the mask of all queries on all keys, for some of the local heads; the core says what it prefers."""
        lengths = f"{self.query_shard.length}/{self.key_shard.length}"
        key = f"context/{self.causal}/{lengths}/{self.dropout}/{self.shared_qk}/{self.observed is not None}"
        plain: AttentionMask = self.query_shard.shared_values.get_or_compute(key, self._plain)
        position, selected = self.position, slice(first_head, first_head + heads)
        if position is not None and self.pairs is not None:
            terms = position.terms_of_pairs(self.pairs)
            indices = torch.arange(first_head, first_head + heads, device=plain.device)
            return replace(plain, position_terms=terms.select_heads(indices))
        if position is not None and (
            self.uses_relative_bias
            or (not self.reads_bias and prefers_relative_bias(position, plain))
        ):
            by_distance = plain.with_relative_bias(position)
            return replace(
                by_distance, relative_bias=lambda after: position.relative_bias(after)[selected]
            )
        bias = self.bias_of(self.query_shard.full.positions, self.key_shard.full.positions)
        return plain if bias is None else replace(plain, bias=bias[:, selected])

    def allowed_of_shard(self) -> Tensor | None:
        """Return where the rank's P queries see the S keys of all ranks, bool [B or 1, 1, P, S]; None: everywhere."""
        allowed = self._plain().allowed
        return None if allowed is None else self.sharding.shard(allowed[:, 0])[:, None]

    def _plain(self) -> AttentionMask:
        """Return the mask of all queries on all keys, without a bias."""
        documents = self.documents
        weight = self.query_shard.forward.aux_loss_weight
        return AttentionMask(
            queries=self.query_shard.length,
            keys=self.key_shard.length,
            causal=self.causal,
            query_documents=self.query_shard.full.documents if documents else None,
            key_documents=self.key_shard.full.documents if documents else None,
            spans=self.query_shard.full.found_document_spans()
            if documents and self.query_shard is self.key_shard
            else None,
            hides_padding=self.hides_padding,
            key_padding=self.key_shard.full.padding,
            query_padding=self.query_shard.full.padding,
            key_prefix=self.key_shard.full.prefix,
            observed=self.observed,
            dropout=self.dropout,
            shared_qk=self.shared_qk,
            stats=self.query_shard.forward.stats,
            # Each rank has a mean over its heads, and gradients are summed over the ranks.
            aux_loss_weight=None if weight is None else weight / self.sharding.count,
            device=self.query_shard.ids.device,
        )

    def bias_of(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Return the bias [B or 1, H, T, S] for positions of queries and keys."""
        return None if self.position is None else self.position.bias(queries, keys)


@dataclass(frozen=True)
class ShardedMaskBuilder:
    """Substitute for an attention's `make_mask`: masks of shards when it gets shards, as generation does not."""

    attention: ShardedAttention
    inner: Callable[[Tensor, Tensor, Tokens, Tokens], AttentionMask]
    """Makes the mask of an unsharded sequence."""

    def __call__(self, q: Tensor, k: Tensor, tokens: Tokens, key_tokens: Tokens) -> AttentionMask:
        attention = self.attention
        if not isinstance(tokens, TokenShard):
            return self.inner(q, k, tokens, key_tokens)
        assert isinstance(key_tokens, TokenShard), "both sequences are sharded"
        documents = attention.keeps_documents_apart(tokens, key_tokens)
        position = attention.position
        reads = position is not None and position.adds_scores
        biased = position is not None and (position.adds_bias or reads)
        projects = position is not None and position.projects
        return ShardedAttentionMask(
            queries=q.shape[2],
            keys=k.shape[2],
            causal=attention.causal,
            documents=documents,
            hides_padding=attention.core.hides_padding(documents),
            observed=None if attention.cross else tokens.full.get(OBSERVED),
            dropout=0.0 if tokens.forward.rng_seed is None else attention.dropout,
            shared_qk=attention.shared_qk,
            query_shard=tokens,
            key_shard=key_tokens,
            position=position if biased else None,
            pairs=attention.pairs(tokens.length, key_tokens.length) if reads else None,
            projections=(attention.q, attention.k, attention.q_norm, attention.k_norm)
            if projects
            else (),
            uses_relative_bias=attention.uses_relative_bias,
            reads_bias=attention.reads_bias,
        )
