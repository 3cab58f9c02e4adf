"""Vaswani et al. 2017: multi-head attention around any core, with grouped queries (Ainslie et al. 2023)."""

from dataclasses import replace
from typing import Any, Literal, Self

import pydantic
import torch
from torch import Tensor

from xscale.core.config import FractionBelowOne, PositiveFloat, PositiveInt
from xscale.core.errors import ConfigError
from xscale.nn.attention.core import CORES, Core, CoreSlot
from xscale.nn.attention.ops.mask import OBSERVED, AttentionMask, ScoreEdge
from xscale.nn.attention.ops.without_padding import attend_text
from xscale.nn.attention.softmax import Softmax
from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.mixer.attention_checks import AttentionChecks
from xscale.nn.mixer.kv_cache import last_keys, with_cached
from xscale.nn.mixer.mixer import MIXERS, Mixer, MixerTraits
from xscale.nn.norm.norm import NORMS, Norm, NormSlot
from xscale.nn.position.pairs import Pairs, PositionPairs
from xscale.nn.position.position import POSITIONS, Position, PositionSlot
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


@MIXERS.register(
    "attention",
    traits=MixerTraits(
        causal=True,
        bidirectional=True,
        cross=True,
        documents=True,
        decode=True,
        prefix=True,
        static_decode=True,
    ),
)
class Attention(AttentionChecks):
    class Config(Mixer.Config):
        heads: PositiveInt = 8
        """H, query heads."""
        kv_heads: PositiveInt | None = None
        """G, key and value heads: 1 is multi-query attention, null multi-head (as many as query heads)."""
        head_width: PositiveInt | None = None
        """K, width of a head; null: width / heads."""
        core: CoreSlot = Softmax.Config()
        """The attention core, q, k, v -> o."""
        shared_qk: bool | None = None
        """Whether queries and keys have one projection (Kitaev et al. 2020, for hashing); null: as the core's paper
        has it, so true for `reformer` and false for others."""
        bias: bool = False
        """Whether the projections have biases."""
        output_bias: bool | None = None
        """Whether the output projection has a bias; null: as the others."""
        qk_norm: NormSlot | None = None
        """Norm of each query and key before their product (Henry et al. 2020); null: none."""
        qk_norm_over: Literal["head", "heads"] = "head"
        """Channels over which qk_norm normalises: those of one head, or of all heads of a token together (OLMo 2)."""
        scale: PositiveFloat | None = None
        """Factor of the scores q k^T; null: 1 / sqrt(head_width)."""
        position: PositionSlot | None = None
        """Position encoding of this mixer, which acts on its queries and keys or scores; null: the model's."""
        dropout: FractionBelowOne = 0.0
        """Dropout probability of the attention weights."""

        @pydantic.model_validator(mode="after")
        def _resolve_shared_qk(self) -> Self:
            # Where null means false it is written so, as the run folders of earlier versions have it.
            if (
                self.shared_qk is None
                and self.core.kind
                and not CORES.of(self.core).part.shares_qk(self.core)
            ):
                object.__setattr__(self, "shared_qk", False)
            return self

    seams = {
        "attend": Role.ATTENTION,
        "attend_input": Role.OBSERVED_INPUT,
        "make_mask": Role.ATTENTION_MASK,
        "norm_all_heads": Role.NORM_OVER_HEADS,
    }
    shards_sequence = True
    """Whether context parallelism may shard the sequence if the core can; false where `attend_input` reads all of x."""

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        heads, groups = config.heads, config.kv_heads or config.heads
        self.head_width = config.head_width or dims.width // heads
        inner, outer = heads * self.head_width, groups * self.head_width
        self.cross = dims.cross
        self.causal = dims.causal and not dims.cross
        self.dropout = config.dropout
        self.core_separates_documents: bool = (
            CORES.of(config.core).part.traits_of(config.core).documents
        )
        self.q = Linear.from_width(dims, inner, "heads", bias=config.bias)
        self.k: Linear | None = None
        self.shared_qk = self._shares_qk(config, dims)
        if not self.shared_qk:
            self.k = Linear.from_width(dims, outer, "kv_heads", bias=config.bias)
        self.v = Linear.from_width(dims, outer, "kv_heads", bias=config.bias)
        output_bias = config.bias if config.output_bias is None else config.output_bias
        self.o = Linear.to_width(dims, inner, "heads", bias=output_bias)
        norm, over_all = config.qk_norm, config.qk_norm_over == "heads"
        self.qk_norm_over = "head" if norm is None else config.qk_norm_over
        self.q_norm: Norm | None = (
            None if norm is None else NORMS.build(norm, inner if over_all else self.head_width)
        )
        self.k_norm: Norm | None = (
            None if norm is None else NORMS.build(norm, outer if over_all else self.head_width)
        )
        # Cores divide the scores by sqrt(K), so the queries are multiplied by what is missing.
        self.query_factor = None if config.scale is None else config.scale * self.head_width**0.5
        self.core: Core = CORES.build(config.core, dims, heads, self.head_width)
        # Positions of two sequences are not comparable, so cross attention has no position encoding.
        self.position: Position | None = None
        self.uses_relative_bias = False
        if not dims.cross:
            self.build_position(config.position or dims.position, dims, heads, self.head_width)

    def build_position(self, position: Any, dims: Dims, heads: int, rotated_width: int) -> None:
        """Build the position encoding of this config, for so many channels of a head; None: none."""
        if position is not None:
            self.position = POSITIONS.build(position, dims, heads, rotated_width)
            if self.query_factor is None and self.position.score_factor != 1:
                self.query_factor = self.position.score_factor
            # Within a document positions count tokens, so a difference of indices is the distance.
            self.uses_relative_bias = (
                self.position.adds_bias
                and self.core.uses_relative_bias
                and POSITIONS.of(position).traits.relative
            )

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
            q, (k, v) = self._normalised(self.q_norm, self.q(x)), self._memory(memory, tokens)
            key_tokens = source
        else:
            q, k, v = self.project(x, tokens, memory)
            key_tokens = tokens if source is None else source
            position = self.position
            if position is not None and key_tokens is tokens:
                q, k = position.rotate_both(q, k, tokens)
            elif position is not None:
                q, k = position.rotate(q, tokens), position.rotate(k, key_tokens)
            k, v = with_cached(tokens, self.path, k, v)
        if self.query_factor is not None:
            q = q * self.query_factor
        mask = self.with_state(self.make_mask(q, k, tokens, key_tokens), tokens, edge)
        return self.project_output(self.attend_input(x, tokens, q, k, v, mask))

    def with_state(
        self, mask: AttentionMask, tokens: Tokens, edge: ScoreEdge | None
    ) -> AttentionMask:
        """Return the mask with the scores that blocks hand on, and the core's state during generation."""
        mask = mask if edge is None else replace(mask, score_edge=edge)
        if not self.core.keeps_state or tokens.forward.cache is None:
            return mask
        return replace(mask, cache=tokens.forward.cache.setdefault(f"{self.path}.core", {}))

    def project(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, H, T, K] of x [B, T, D], keys and values [B, G, S, K] of `memory` [B, S, D]; None: x."""
        projected = self.q(x)  # [B, T, H * K]
        return self._normalised(self.q_norm, projected), *self._keys(
            x if memory is None else memory, projected
        )

    def attend_input(
        self, x: Tensor, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> Tensor:
        """Return the heads' outputs [B, H, T, K]; mixers that also attend with other projections of x override it."""
        return self.attend(q, k, v, mask)

    def project_output(self, o: Tensor) -> Tensor:
        """Project the heads' outputs [B, H, T, K] to the width: [B, T, D]."""
        return self.o(o.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """Run the core: q [B, H, T, K], k and v [B, G, S, K] -> [B, H, T, K]. A seam: context parallelism."""
        return attend_text(self.core, q, k, v, mask)

    @property
    def decodes(self) -> bool:
        return self.core.traits.decode

    @property
    def hands_on_scores(self) -> bool:
        return self.core.traits.previous_scores

    @property
    def previous_score_heads(self) -> int:
        return self.core.previous_score_heads

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)  # [B, H, T, K]

    def _normalised(self, norm: Norm | None, x: Tensor) -> Tensor:
        """[B, T, H * K] -> [B, H, T, K]."""
        if norm is not None and self.qk_norm_over == "heads":
            return self._heads(self.norm_all_heads(norm, x))
        heads = self._heads(x)
        return heads if norm is None else norm(heads)

    def norm_all_heads(self, norm: Norm, x: Tensor) -> Tensor:
        """Norm of x [B, T, H * K] over the channels of all heads. A seam: tensor parallelism shards the heads."""
        normalised: Tensor = norm(x)
        return normalised

    def _keys(self, x: Tensor, shared: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, S, K]; `shared` [B, S, H * K] is the projection that queries and keys share."""
        projected = shared if (key := self.k) is None else key(x)  # [B, S, G * K]
        assert projected is not None
        return self._normalised(self.k_norm, projected), self._heads(self.v(x))

    def _memory(self, memory: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Keys and values of the other sequence, [B, G, S, K]; during generation they are computed once."""
        if tokens.forward.cache is None:
            return self._keys(memory)
        if self.path not in tokens.forward.cache:
            tokens.forward.cache[self.path] = self._keys(memory)
        cached: tuple[Tensor, Tensor] = tokens.forward.cache[self.path]
        return cached

    def keeps_documents_apart(self, tokens: Tokens, key_tokens: Tokens) -> bool:
        """Whether the core must mask documents, other than padding, from each other; ConfigError if it cannot."""
        documents = None not in (tokens.documents, key_tokens.documents)
        if documents and not self.core_separates_documents:
            if key_tokens.padding is not None:
                return False
            can = ", ".join(CORES.able(documents=True))
            what = f"the core of {self.path} cannot mask packed documents from each other"
            raise ConfigError(
                "data.cross_documents", what, f"Set it to true, or take one of: {can}."
            )
        return documents

    def make_mask(self, q: Tensor, k: Tensor, tokens: Tokens, key_tokens: Tokens) -> AttentionMask:
        """Describe which keys each query sees, and the bias on their scores. A seam: context parallelism."""
        documents = self.keeps_documents_apart(tokens, key_tokens)

        def compute() -> AttentionMask:
            return AttentionMask(
                queries=q.shape[2],
                keys=k.shape[2],
                causal=self.causal,
                offset=k.shape[2] - q.shape[2]
                if key_tokens is tokens and not self.cross
                else key_tokens.memory_tokens,
                query_documents=tokens.documents if documents else None,
                key_documents=key_tokens.documents if documents else None,
                spans=tokens.found_document_spans() if documents and key_tokens is tokens else None,
                hides_padding=self.core.hides_padding(documents),
                key_padding=key_tokens.padding,
                query_padding=tokens.padding,
                key_prefix=key_tokens.prefix,
                observed=None if self.cross else tokens.get(OBSERVED),
                last_keys=None if self.cross else last_keys(tokens, k.shape[2]),
                dropout=0.0 if tokens.forward.rng_seed is None else self.dropout,
                shared_qk=self.shared_qk,
                stats=tokens.forward.stats,
                aux_loss_weight=tokens.forward.aux_loss_weight,
                device=q.device,
            )

        options = (
            self.causal,
            self.dropout,
            self.cross,
            self.shared_qk,
            documents,
            self.core.hides_padding(documents),
        )
        key = f"mask/{q.shape[2]}/{k.shape[2]}/{'/'.join(map(str, options))}"
        plain: AttentionMask = tokens.shared_values.get_or_compute(key, compute)
        position = self.position
        if position is not None and position.adds_scores:
            pairs = replace(self.pairs(q.shape[2], k.shape[2]), offset=plain.offset)
            if tokens.pooled_from is not None:
                pairs = PositionPairs.of(
                    pairs, tokens.positions, key_tokens.positions, tokens.pooled_from
                )
            return replace(plain, position_terms=position.terms_of_pairs(pairs))
        if position is None or not position.adds_bias:
            return plain
        # The bias of each block's own parameters is not a shared value.
        prefers = self.core.prefers_relative_bias
        if tokens.pooled_from is not None:
            # Where a sequence was shortened, a difference of indices is no distance.
            return replace(plain, bias=position.bias(tokens.positions, key_tokens.positions))
        by_distance = self.uses_relative_bias and plain.last_keys is None
        if by_distance or (not self.reads_bias and prefers(position, q, k, plain)):
            return plain.with_relative_bias(position)
        return replace(plain, bias=self._bias(k, tokens))

    def pairs(self, queries: int, keys: int) -> Pairs:
        """Describe the pairs of the last T of S tokens with all of them, for a position that reads queries and keys."""
        return Pairs(
            queries,
            keys,
            offset=keys - queries,
            causal=self.causal,
            query_factor=1.0 if self.query_factor is None else self.query_factor,
            project=self._project_embeddings,
        )

    def _project_embeddings(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Project embeddings of distances [N, D] to queries [H, N, K] and keys [G, N, K]."""
        projected = self.q(embeddings[None])
        key_projection = projected if self.k is None else self.k(embeddings[None])
        return self._normalised(self.q_norm, projected)[0], self._normalised(
            self.k_norm, key_projection
        )[0]

    def _bias(self, k: Tensor, tokens: Tokens) -> Any:
        assert self.position is not None
        keys = tokens.positions
        if tokens.forward.cache is not None:
            # Cached tokens have the positions 0, 1, 2 ...
            places = torch.arange(k.shape[2], dtype=keys.dtype, device=keys.device)
            keys = places.expand(keys.shape[0], -1)
        return self.position.bias(tokens.positions, keys)

    def multiply_adds(self, queries: int, keys: int) -> float:
        return self.core.multiply_adds(
            queries, keys, self.query_channels // self.head_width, self.head_width
        )
