"""DeepSeek-AI 2024 (DeepSeek-V2), section 2.1: multi-head latent attention, which caches one small vector a token.

    c = norm(W_dkv h),  c' = norm(W_dq h)
    q = [W_uq c', rope(W_qr c')],  k = [W_uk c, rope(W_kr h)],  v = W_uv c

The rotated part of the keys is the same for all heads. Generation caches c and rope(W_kr h), of all heads together.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xscale.core.config import FractionBelowOne, PositiveFloat, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import at_most
from xscale.nn.attention.core import CORES, CoreSlot
from xscale.nn.attention.ops.mask import ScoreEdge
from xscale.nn.attention.softmax import Softmax
from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.kv_cache import with_cached
from xscale.nn.mixer.mixer import CAUSAL_OR_BIDIRECTIONAL, MIXERS, Mixer, RefusedPositions
from xscale.nn.norm.norm import NORMS, Norm, NormSlot, Rms
from xscale.nn.position.position import PositionSlot
from xscale.nn.tokens import Tokens


@MIXERS.register(
    "mla",
    traits=replace(CAUSAL_OR_BIDIRECTIONAL, prefix=True, static_decode=True),
    deviations=(
        "Generation projects the cached latents to keys and values at each step; W_uk and W_uv are not absorbed into "
        "the other projections.",
    ),
)
class Mla(Attention):
    class Config(Mixer.Config):
        heads: PositiveInt = 8
        """H, heads of queries, keys and values."""
        kv_latent_width: PositiveInt = 64
        """Width of the latent c of keys and values (`kv_lora_rank`)."""
        query_latent_width: PositiveInt | None = None
        """Width of the latent c' of the queries (`q_lora_rank`); null: queries are projected from the input."""
        head_width: PositiveInt | None = None
        """Channels of a head's queries and keys that carry no position (`qk_nope_head_dim`); null: width / heads."""
        rope_width: int = Field(default=16, ge=2, multiple_of=2)
        """Channels of a head's queries and keys that the position encoding rotates (`qk_rope_head_dim`)."""
        value_width: PositiveInt | None = None
        """Channels of a head's values (`v_head_dim`); null: head_width."""
        core: CoreSlot = Softmax.Config()
        """The attention core, q, k, v -> o."""
        norm: NormSlot = Rms.Config()
        """Norm of both latents."""
        scale: PositiveFloat | None = None
        """Factor of the scores q k^T; null: 1 / sqrt(head_width + rope_width)."""
        position: PositionSlot | None = None
        """Position encoding of this mixer; null: the model's."""
        dropout: FractionBelowOne = 0.0
        """Dropout probability of the attention weights."""

        @property
        def shared_qk(self) -> bool:
            """Queries and keys have projections of their own, whatever the core's paper has."""
            return False

    refused_positions = RefusedPositions(
        ("scores",), "reads whole queries, of which `mla` gives a position rope_width channels"
    )

    def __init__(self, config: Config, dims: Dims) -> None:
        super(Attention, self).__init__()
        heads, latent_width = config.heads, config.kv_latent_width
        self.plain_width = config.head_width or dims.width // heads
        self.value_width = config.value_width or self.plain_width
        self.head_width = self.plain_width + config.rope_width
        self.cross = False
        self.causal = dims.causal
        self.dropout = config.dropout
        self.core_separates_documents = CORES.of(config.core).part.traits_of(config.core).documents
        self.shared_qk, self.qk_norm_over, self.q_norm, self.k_norm = False, "head", None, None
        self.query_factor = None if config.scale is None else config.scale * self.head_width**0.5
        query_latent_width = config.query_latent_width or dims.width
        self.q_down: Linear | None = None
        self.q_latent_norm: Norm | None = None
        if config.query_latent_width is not None:
            self.q_down = Linear.from_width(dims, query_latent_width, "state")
            self.q_latent_norm = NORMS.build(config.norm, query_latent_width)
        self.q = Linear(query_latent_width, heads * self.head_width, ("heads", "width"), dims.init)
        self.kv_down = Linear.from_width(dims, latent_width + config.rope_width, "state")
        self.kv_latent_norm: Norm = NORMS.build(config.norm, latent_width)
        self.k = Linear(latent_width, heads * self.plain_width, ("heads", "state"), dims.init)
        self.v = Linear(latent_width, heads * self.value_width, ("heads", "state"), dims.init)
        self.o = Linear.to_width(dims, heads * self.value_width, "heads")
        self.core = CORES.build(config.core, dims, heads, self.head_width)
        self.position, self.uses_relative_bias = None, False
        self.build_position(config.position or dims.position, dims, heads, config.rope_width)

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        widest = (config.head_width or dims.width // config.heads) + config.rope_width
        if config.value_width is not None and config.value_width > widest:
            what = f"must be <= head_width + rope_width = {widest}, got {config.value_width}"
            problems.append(at_most(f"{path}.value_width", what, widest))
        return problems

    @property
    def key_projection(self) -> Linear:
        """A projection with as many rows as keys have heads and channels: that of the queries."""
        return self.q

    def forward(
        self,
        x: Tensor,
        tokens: Tokens,
        memory: Tensor | None = None,
        source: Tokens | None = None,
        edge: ScoreEdge | None = None,
    ) -> Tensor:
        queries = x
        if self.q_down is not None and self.q_latent_norm is not None:
            queries = self.q_latent_norm(self.q_down(x))  # [B, T, query_latent_width]
        q = self._heads(self.q(queries))  # [B, H, T, K]
        latent, rotated = self.kv_down(x).tensor_split([self.latent_width], -1)
        latent, rotated = self.kv_latent_norm(latent)[:, None], rotated[:, None]  # [B, 1, T, ...]
        if self.position is not None:
            plain, turned = q.tensor_split([self.plain_width], -1)
            q = torch.cat((plain, self.position.rotate(turned, tokens)), -1)
            rotated = self.position.rotate(rotated, tokens)
        latent, rotated = with_cached(tokens, self.path, latent, rotated)
        k, v = self._expand(latent[:, 0], rotated)
        if self.query_factor is not None:
            q = q * self.query_factor
        mask = self.with_state(self.make_mask(q, k, tokens, tokens), tokens, edge)
        return self.project_output(
            self.attend_input(x, tokens, q, k, v, mask)[..., : self.value_width]
        )

    @property
    def latent_width(self) -> int:
        """Width of the latent of keys and values."""
        assert self.k is not None
        return int(self.k.weight.shape[1])

    def _expand(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [B, S, R] and rotated keys [B, 1, S, P] -> keys and values [B, H, S, K]."""
        assert self.k is not None
        plain = (
            self.k(latent).unflatten(-1, (-1, self.plain_width)).transpose(1, 2)
        )  # [B, H, S, K - P]
        k = torch.cat((plain, rotated.expand(-1, plain.shape[1], -1, -1)), -1)
        v = self.v(latent).unflatten(-1, (-1, self.value_width)).transpose(1, 2)
        # Cores take values as wide as keys.
        return k, F.pad(v, (0, self.head_width - self.value_width))
