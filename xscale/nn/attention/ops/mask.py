"""The attention mask that a core gets: causal order, packed documents, the bias on the scores, dropout."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from xscale.nn.attention.ops.recurrence import Recurrence
from xscale.nn.compiling.traceable_property import TraceableProperty
from xscale.nn.forward import Stats
from xscale.nn.position.position import Position, PositionTerms
from xscale.nn.signals import BATCH, KEYS, TOKENS, Signal, TokenAxes
from xscale_kernels.packed_attention import DocumentSpans, find_document_spans

OBSERVED = Signal[Tensor]("attention.observed", TokenAxes((BATCH, TOKENS, KEYS)))
"""[B, T, T], whether each query (row) observes each token, in the self-attention of a disentangled decoder (Kasai et
al. 2020); None: it observes all."""


@dataclass
class ScoreEdge:
    """Attention scores on their way through the depth: what one attention gets from the block before, and hands on."""

    previous: Tensor | None = None
    """[B, H, T, S] from the attention at the same place of the previous block; None: there is none."""
    scores: Tensor | None = None
    """[B, H, T, S] for the next block, written by a core or mixer that hands on its scores: before mask and softmax,
    in float32 at least."""


@dataclass(frozen=True)
class AttentionMask:
    """Which of S keys each of T queries sees, and what is added to their scores."""

    queries: int
    """T."""
    keys: int
    """S."""
    causal: bool
    offset: int = 0
    """Index of the first query among the keys: S - T while decoding with a KV cache."""
    query_documents: Tensor | None = None
    """[B, T]; a query sees the keys of its own document only."""
    key_documents: Tensor | None = None
    """[B, S]."""
    hides_padding: bool = True
    """Whether the core hides the padding of keys, by its documents or by causal order; else it is called without."""
    key_padding: Tensor | None = None
    """[B, S], whether each key is of the padding behind a sample; None: there is none, or it is not told from text."""
    query_padding: Tensor | None = None
    """[B, T], the same of the queries."""
    key_prefix: Tensor | None = None
    """[B, S], whether each key is of its document's prefix, which earlier queries see too, for cores with the trait
    `prefix`; None: there is no prefix."""
    observed: Tensor | None = None
    """[B, T, S], which keys each query observes beside what else decides; a query may observe none, and its output is 0
    then. None: all."""
    last_keys: Tensor | None = None
    """[B, T], index of the last key that each query sees, for cores with the trait `static_decode`: those behind it are
    the unwritten part of a cache of a fixed capacity. None: all keys are there."""
    bias: Tensor | None = None
    """[B or 1, H, T, S] added to the scores."""
    relative_bias: Callable[[Tensor], Tensor] | None = None
    """Relative bias: offsets key - query [N] (negative = past) -> [H, N]. Used instead of `bias` by cores with
    `uses_relative_bias`."""
    bias_reach: int | None = None
    """Distance in tokens from which on `relative_bias` is constant; None: it may change at any."""
    linear_bias: bool = False
    """Whether `relative_bias` is minus a slope of each head times the distance (ALiBi)."""
    position_terms: PositionTerms | None = None
    """Terms of the scores and of the output that read queries and keys; for cores with the trait `position_terms`."""
    dropout: float = 0.0
    """Dropout probability of the attention weights in training."""
    shared_qk: bool = False
    """Whether queries and keys have one projection, so that a token's score with itself is its highest: cores that
    choose keys by similarity avoid it."""
    stats: Stats | None = None
    """Collects statistics of the step for cores with `running_stats`; None: not collected."""
    aux_loss_weight: float | None = None
    """Weight of auxiliary losses in backward, for cores that have one; None: no auxiliary loss."""

    score_edge: ScoreEdge | None = None
    """Scores from the previous block and for the next, for cores with the trait `previous_scores`; None: not in a
    stack that hands them on."""
    cache: dict[str, Tensor] | None = None
    """State of a core between the calls of a generation, for cores that `keeps_state`; None: all queries are here."""
    prior_state: Callable[[Tensor], Tensor] | None = None
    """Context parallelism: local state [B, G, F, K] of the last document's keys -> state of all earlier shards. A seam
    for a shard of a causal sequence, called by cores that carry the past as a state."""
    carried_state: Callable[[Recurrence], Tensor] | None = None
    """Context parallelism: the recurrence of the shard -> the state [B, H, F, K] before it, of the document of its
    first token. A seam as `prior_state`, for cores whose state is not a sum over the shards."""
    prior_document: Tensor | None = None
    """[B], document of the token before the shard; None without documents."""
    spans: DocumentSpans | None = None
    """Spans of `query_documents`, found while they were on the CPU; None: the host waits for a GPU to read them."""
    device: torch.device | None = None
    """Device of `allowed`; None: that of the documents or the bias, or the CPU without either."""
    derived: dict[str, tuple[Tensor | None, Any]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Values that attention derived from causal order and the documents, with those documents; copies that add a bias
    share them. See `derive`."""

    def derive(self, key: str, compute: Callable[[], Any]) -> Any:
        """Return what `compute` derives from causal order and documents, computed once for all blocks by this key."""
        key = f"{key}/{self.queries}/{self.keys}/{self.causal}"
        documents, value = self.derived.get(key, (None, None))
        if value is None or documents is not self.query_documents:
            value = compute()
            self.derived[key] = (self.query_documents, value)
        return value

    def with_relative_bias(self, position: Position) -> "AttentionMask":
        """Return the mask with the position's bias on the scores, by distance."""
        return replace(
            self,
            relative_bias=position.relative_bias,
            bias_reach=position.reach,
            linear_bias=position.linear_bias,
        )

    @property
    def is_only_causal(self) -> bool:
        """Whether only `causal` decides: no documents, no prefix, no bias, no KV cache, all observed."""
        is_biased = any(
            bias is not None for bias in (self.bias, self.relative_bias, self.position_terms)
        )
        hidden = (self.query_documents, self.key_prefix, self.observed, self.last_keys)
        is_plain = all(tensor is None for tensor in hidden)
        return is_plain and not is_biased and self.offset == 0

    def score_bias(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Return what is added to the scores [B or 1, H, T, S] of q [B, H, T, K], k [B, G, S, K]; None: nothing."""
        if self.position_terms is None:
            return self.bias
        terms = self.position_terms.scores(q, k)
        return terms if self.bias is None else terms + self.bias

    @TraceableProperty
    def lengths(self) -> list[tuple[int, int]]:
        """Queries and keys of each sample without their padding: read once for all blocks."""
        assert self.key_padding is not None
        keys = (~self.key_padding).sum(1)
        queries = (
            torch.full_like(keys, self.queries)
            if self.query_padding is None
            else (~self.query_padding).sum(1)
        )
        pairs: list[tuple[int, int]] = list(map(tuple, torch.stack((queries, keys), 1).tolist()))
        return pairs

    @TraceableProperty
    def document_spans(self) -> DocumentSpans:
        """Spans of the queries' documents, on the device of the documents: found once for all blocks."""
        assert self.query_documents is not None
        spans = find_document_spans(self.query_documents) if self.spans is None else self.spans
        return spans.to(self.query_documents.device)

    @TraceableProperty
    def allowed(self) -> Tensor | None:
        """Bool [B or 1, 1, T, S], true where a query sees a key; None: all keys."""
        allowed = None
        tensor = self.bias if self.query_documents is None else self.query_documents
        device = self.device if tensor is None else tensor.device
        # The last query alone, as in generation, sees all keys.
        if self.causal and self.offset < self.keys - 1:
            allowed = torch.ones(self.queries, self.keys, dtype=torch.bool, device=device).tril(
                self.offset
            )[None, None]
        if allowed is not None and self.key_prefix is not None:
            allowed = allowed | self.key_prefix[:, None, None, :]  # [B, 1, T, S]
        if self.query_documents is not None:
            assert self.key_documents is not None
            same = (
                self.query_documents[:, None, :, None] == self.key_documents[:, None, None, :]
            )  # [B, 1, T, S]
            allowed = same if allowed is None else allowed & same
        if self.last_keys is not None:
            written = (
                torch.arange(self.keys, device=self.last_keys.device) <= self.last_keys[..., None]
            )
            allowed = written[:, None] if allowed is None else allowed & written[:, None]
        if self.observed is not None:
            observed = self.observed[:, None]  # [B, 1, T, S]
            allowed = observed if allowed is None else allowed & observed
        return allowed
