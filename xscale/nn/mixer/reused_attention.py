"""Ying et al. 2021 (LazyFormer): a layer that uses the attention map of the layer before, and projects values alone.

    o_h = softmax(S_h) V_h,  V = x W_v,  S [B, H, T, S] the scores that the previous block hands on

A lazy block is a block with the core `prior_scores` (previous: 0), which computes the map, and blocks with this mixer,
which hand the scores on as they got them.
"""

from dataclasses import replace

from torch import Tensor

from xscale.core.config import FractionBelowOne
from xscale.nn.attention.ops.dense import masked_softmax, upcast
from xscale.nn.attention.ops.mask import AttentionMask, ScoreEdge
from xscale.nn.dims import Dims
from xscale.nn.mixer.mixer import CAUSAL_OR_BIDIRECTIONAL, MIXERS
from xscale.nn.mixer.synthesizer import ValueCache
from xscale.nn.mixer.value_mixer import ValueMixer
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


@MIXERS.register(
    "reused_attention",
    traits=replace(CAUSAL_OR_BIDIRECTIONAL, cross=True),
    deviations=(
        "Scores are handed on, and each layer computes their softmax again; terms that a position adds to the output "
        "(as Shaw et al. do) are the first layer's alone.",
    ),
)
class ReusedAttention(ValueMixer):
    class Config(ValueMixer.Config):
        dropout: FractionBelowOne = 0.0
        """Dropout probability of the attention weights; the paper has none, as the layers share one map."""

    seams = {"attend": Role.REUSED_ATTENTION}
    needs_previous_scores = True
    shards_sequence = True

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        self.cross = dims.cross
        self.causal = dims.causal and not dims.cross
        self.dropout = config.dropout

    @property
    def hands_on_scores(self) -> bool:
        return True

    @property
    def previous_score_heads(self) -> int:
        return self.heads

    @classmethod
    def score_heads(cls, config: Config) -> int | None:
        return int(config.heads)

    @classmethod
    def reads_scores(cls, config: Config) -> bool:
        return True

    def forward(
        self,
        x: Tensor,
        tokens: Tokens,
        memory: Tensor | None = None,
        source: Tokens | None = None,
        edge: ScoreEdge | None = None,
    ) -> Tensor:
        if self.cross:
            assert memory is not None
            assert source is not None
            v, key_tokens = self._values_of_memory(memory, tokens), source
        else:
            v, key_tokens = self.values(x), tokens
            if tokens.forward.cache is not None:
                v = tokens.forward.cache.setdefault(self.path, ValueCache()).append(v)
        return self.project_output(self.attend(v, tokens, key_tokens, edge))

    def _values_of_memory(self, memory: Tensor, tokens: Tokens) -> Tensor:
        """Values of the other sequence [B, H, S, K]; during generation they are computed once."""
        if tokens.forward.cache is None:
            return self.values(memory)
        if self.path not in tokens.forward.cache:
            tokens.forward.cache[self.path] = (self.values(memory),)
        (v,) = tokens.forward.cache[self.path]
        return v  # type: ignore[no-any-return]

    def attend(
        self, v: Tensor, tokens: Tokens, key_tokens: Tokens, edge: ScoreEdge | None
    ) -> Tensor:
        """Weight the values v [B, H, S, K] by the scores of the layer before: [B, H, T, K].

        A seam: context parallelism.
        """
        scores = None if edge is None else edge.previous
        if scores is None:
            # Outside a stack there is no layer before, and all scores are equal.
            scores = upcast(v).new_zeros(*v.shape[:2], tokens.ids.shape[1], v.shape[2])
        if edge is not None:
            edge.scores = scores
        return self.weights(scores, tokens, key_tokens).to(v.dtype) @ v

    def weights(self, scores: Tensor, tokens: Tokens, key_tokens: Tokens) -> Tensor:
        """Scores [B, H, T, S] -> attention weights, with dropout in training."""
        queries, keys = scores.shape[2:]
        documents = None not in (tokens.documents, key_tokens.documents)
        mask = AttentionMask(
            queries,
            keys,
            self.causal,
            offset=keys - queries,
            query_documents=tokens.documents if documents else None,
            key_documents=key_tokens.documents if documents else None,
            device=scores.device,
        )
        weights = masked_softmax(
            scores, None if mask.allowed is None else ~mask.allowed.to(scores.device)
        )
        drops = self.training and tokens.forward.rng_seed is not None
        return self.random.dropout(
            weights, self.dropout if drops else 0.0, ("batch", "heads", "state", "state")
        )

    def multiply_adds(self, queries: int, keys: int) -> float:
        return float(self.heads * queries * keys * self.head_width)
