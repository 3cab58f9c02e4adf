"""Cordonnier et al. 2020 (collaborative multi-head attention): all heads share one projection of queries and of keys.

    o_h = Attention(x W_q diag(m_h), x W_k, x W_v_h),  scores divided by sqrt(K)

A head is the vector m_h, which weighs the shared channels; there may be fewer of these than heads x head_width.
Generation caches the keys of all heads once.
"""

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import FractionBelowOne, PositiveFloat, PositiveInt
from xscale.nn.attention.core import CORES, CoreSlot
from xscale.nn.attention.ops.mask import ScoreEdge
from xscale.nn.attention.softmax import Softmax
from xscale.nn.dims import Dims
from xscale.nn.init import Init
from xscale.nn.linear import Linear
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.kv_cache import with_cached
from xscale.nn.mixer.mixer import CAUSAL_OR_BIDIRECTIONAL, MIXERS, Mixer
from xscale.nn.position.position import POSITIONS, PositionSlot
from xscale.nn.tokens import Tokens


@MIXERS.register(
    "collaborative",
    traits=replace(CAUSAL_OR_BIDIRECTIONAL, prefix=True, cross=True),
    deviations=(
        "Models of multi-head attention cannot be converted by the paper's tensor decomposition.",
    ),
)
class Collaborative(Attention):
    class Config(Mixer.Config):
        heads: PositiveInt = 8
        """H, heads."""
        shared_width: PositiveInt | None = None
        """Channels of queries and keys that all heads share; null: the width."""
        head_width: PositiveInt | None = None
        """K, channels of a head's values; null: width / heads."""
        core: CoreSlot = Softmax.Config()
        """The attention core, q, k, v -> o."""
        scale: PositiveFloat | None = None
        """Factor of the scores q k^T; null: 1 / sqrt(head_width)."""
        position: PositionSlot | None = None
        """Position encoding of this mixer; null: the model's."""
        dropout: FractionBelowOne = 0.0
        """Dropout probability of the attention weights."""

        @property
        def shared_qk(self) -> bool:
            """Queries and keys have projections of their own, whatever the core's paper has."""
            return False

    # Values are padded to the width of the keys, which only weighted sums leave as they are.
    cores = ("softmax", "block_sparse", "entmax")
    mixing: Parameter

    def __init__(self, config: Config, dims: Dims) -> None:
        super(Attention, self).__init__()
        heads = config.heads
        self.head_width = config.head_width or dims.width // heads
        shared_width = config.shared_width or dims.width
        # Cores take values as wide as keys.
        self.core_width = max(shared_width, self.head_width)
        self.cross = dims.cross
        self.causal = dims.causal and not dims.cross
        self.dropout = config.dropout
        self.core_separates_documents = CORES.of(config.core).part.traits_of(config.core).documents
        self.shared_qk, self.qk_norm_over, self.q_norm, self.k_norm = False, "head", None, None
        scale = self.head_width**-0.5 if config.scale is None else config.scale
        self.query_factor = scale * self.core_width**0.5
        self.shared_q = Linear.from_width(dims, shared_width, "state")
        self.shared_k = Linear.from_width(dims, shared_width, "state")
        self.declare("mixing", (heads, shared_width), ("heads", "state"), Init(std=1.0))
        self.v = Linear.from_width(dims, heads * self.head_width, "heads")
        self.o = Linear.to_width(dims, heads * self.head_width, "heads")
        self.core = CORES.build(config.core, dims, heads, self.core_width)
        self.position, self.uses_relative_bias = None, False
        if not dims.cross:
            self.build_position(config.position or dims.position, dims, heads, self.core_width)

    @classmethod
    def why_not_position(cls, position: Any) -> str | None:
        part = POSITIONS.of(position).part
        if part.projects:
            return "projects its table to queries and keys of each head"
        if part.adds_values_of(position):
            return "adds to values, and those of a head are not as wide as its keys"
        return None

    @property
    def q(self) -> Linear:  # type: ignore[override]
        """A projection with as many rows as queries have heads: that of the values."""
        return self.v

    @property
    def key_projection(self) -> Linear:
        """A projection with as many rows as keys have heads: that of the values."""
        return self.v

    def forward(
        self,
        x: Tensor,
        tokens: Tokens,
        memory: Tensor | None = None,
        source: Tokens | None = None,
        edge: ScoreEdge | None = None,
    ) -> Tensor:
        shared = self.shared_q(x)[:, None]  # [B, 1, T, shared_width]
        q = self._pad(shared * self.use(self.mixing)[:, None])  # [B, H, T, K]
        if self.cross:
            assert memory is not None
            assert source is not None
            k, v = self._memory(memory, tokens)
        else:
            k, v = self._keys(x)
            if self.position is not None:
                q, k = self.position.rotate_both(q, k, tokens)
            k, v = with_cached(tokens, self.path, k, v)
        key_tokens = source if source is not None and self.cross else tokens
        assert self.query_factor is not None
        q, k, v = q * self.query_factor, k.expand(-1, q.shape[1], -1, -1), self._pad(v)
        mask = self.with_state(self.make_mask(q, k, tokens, key_tokens), tokens, edge)
        return self.project_output(
            self.attend_input(x, tokens, q, k, v, mask)[..., : self.head_width]
        )

    def _keys(self, x: Tensor, shared: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys of all heads [B, 1, S, K] and values [B, H, S, K]."""
        return self._pad(self.shared_k(x)[:, None]), self._heads(self.v(x))

    def _pad(self, x: Tensor) -> Tensor:
        """Channels of zeros, which change no product, up to the core's width."""
        return F.pad(x, (0, self.core_width - x.shape[-1]))

    def multiply_adds(self, queries: int, keys: int) -> float:
        heads = self.v.weight.shape[0] // self.head_width
        return self.core.multiply_adds(queries, keys, heads, self.core_width)
