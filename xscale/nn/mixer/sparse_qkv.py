"""Jaszczur et al. 2021, section 3.2: attention whose queries, keys and values come from S modules of M channels.

    y_{s,m} = sum_i x_i D_{i,s} E_{i,m}                                         (multiplicative dense layer)
    q_{t,s,n} = sum_{a,b,m} y_{t+a,s+b,m} W^q_{n,m,a,b} + b^q_n,  k, v likewise  (convolution over length and modules)

D = S M. One multiplicative layer, which can permute the channels in any way, serves queries, keys and values; each of
these has a convolution of 3 tokens by 3 modules, from M channels to M. In a causal model the three tokens end at t. The
modules side by side are the heads' channels. As in the authors' code, no dense layer follows the heads. The cores are
those of attention. Generation keeps the last outputs of the multiplicative layer beside the KV cache.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import FractionBelowOne, PositiveFloat, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import must_divide, take
from xscale.nn.attention.core import CORES, CoreSlot
from xscale.nn.attention.softmax import Softmax
from xscale.nn.dims import Dims
from xscale.nn.init import ZEROS, Init
from xscale.nn.linear import Linear
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import CAUSAL_OR_BIDIRECTIONAL, MIXERS, Mixer, RefusedPositions
from xscale.nn.module import Module
from xscale.nn.neighbours import NeighbourReader, same_document
from xscale.nn.position.position import PositionSlot
from xscale.nn.tokens import Tokens


class MultiplicativeLinear(Module):
    """y_{s,m} = sum_i x_i D_{i,s} E_{i,m}: a map of all channels to all by D * (S + M) weights."""

    scale: Parameter
    weight: Parameter

    def __init__(self, width: int, modules: int, init: Init) -> None:
        super().__init__()
        # The products of both have the variance of a dense layer's weights.
        self.declare("scale", (modules, width), ("state", "width"), Init(std=1.0))
        self.declare("weight", (width // modules, width), ("state", "width"), init, linear_map=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, S * M]."""
        scale, weight = self.use(self.scale), self.use(self.weight)
        if x.shape[0] * x.shape[1] < len(weight):
            return F.linear(x[..., None, :] * scale, weight).flatten(-2)
        # With so many tokens their products with D would be more than those of E with it.
        return F.linear(x, (scale[:, None] * weight).flatten(0, 1))


class ModuleConvolution(Module):
    """A convolution over the length and the modules of a token, from M channels to M."""

    weight: Parameter

    def __init__(self, channels: int, kernel: tuple[int, int], std: float, bias: bool) -> None:
        """`kernel` counts tokens and modules; `std` is that of the initial weights."""
        super().__init__()
        self.declare(
            "weight",
            (channels, channels, *kernel),
            ("state", "state", "tokens", "state"),
            Init(std=std),
        )
        self.bias: Tensor | None
        if bias:
            self.declare("bias", (channels,), ("state",), ZEROS, decays=False)
        else:
            self.register_parameter("bias", None)

    def forward(self, windows: Tensor, shown: Tensor | None) -> Tensor:
        """Windows of modules [B, L, S, M, b] -> [B, T, S * M], T = L - a + 1 for a kernel of a tokens and b modules.

        `shown` [B, T, a] says which of its tokens a window may read; None: all.
        """
        weight = self.use(self.weight).transpose(1, 2)  # [M, a, M, b]
        channels, near = weight.shape[:2]
        taps = F.linear(
            windows.flatten(-2), weight.transpose(0, 1).reshape(near * channels, -1)
        )  # [B, L, S, a * M]
        length = taps.shape[1] - near + 1
        mixed = taps.new_zeros(()) if self.bias is None else self.use(self.bias)
        for at in range(near):
            tap = taps[:, at : at + length, :, at * channels : (at + 1) * channels]  # [B, T, S, M]
            mixed = mixed + (tap if shown is None else tap * shown[..., at, None, None])
        return mixed.flatten(-2)


class QkvProjection(NeighbourReader):
    """Queries, keys and values of a token from it and its neighbours."""

    def __init__(self, config: Any, dims: Dims, *, shared_qk: bool) -> None:
        super().__init__()
        self.width = dims.width
        self.modules_per_token: int = config.modules or config.heads
        self.right = 0 if dims.causal else (config.length_kernel - 1) // 2
        self.left = config.length_kernel - 1 - self.right
        self.module_kernel = config.module_kernel
        kernel, channels = (
            (config.length_kernel, config.module_kernel),
            dims.width // self.modules_per_token,
        )
        self.multiplicative = MultiplicativeLinear(dims.width, self.modules_per_token, dims.init)
        # A convolution keeps the variance of its inputs; without a dense layer behind it, that of the values writes
        # into the residual stream.
        std = (channels * kernel[0] * kernel[1]) ** -0.5
        residual = 1.0 if config.output else dims.residual_init.std / dims.std
        self.q = ModuleConvolution(channels, kernel, std, config.bias)
        self.k = None if shared_qk else ModuleConvolution(channels, kernel, std, config.bias)
        self.v = ModuleConvolution(channels, kernel, std * residual, config.bias)

    def forward(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, D] -> queries, keys and values [B, T, D] each."""
        near, documents = self.with_neighbours(self.multiplicative(x), tokens)
        shown = None if documents is None else same_document(documents, self.left, self.right)
        modules = near.view(*near.shape[:2], self.modules_per_token, -1)  # [B, L, S, M]
        around = self.module_kernel // 2
        windows = F.pad(modules, (0, 0, around, around)).unfold(
            2, self.module_kernel, 1
        )  # [B, L, S, M, b]
        q = self.q(windows, shown)
        return q, q if self.k is None else self.k(windows, shown), self.v(windows, shown)

    @property
    def exchanged_width(self) -> int:
        return self.width

    def reused_multiply_adds(self) -> int:
        """Multiply-adds of a token by weights that each module uses, beyond those of a first module."""
        convolutions = [conv for conv in (self.q, self.k, self.v) if conv is not None]
        weights = self.multiplicative.weight.numel() + sum(
            conv.weight.numel() for conv in convolutions
        )
        return (self.modules_per_token - 1) * weights


@MIXERS.register(
    "sparse_qkv",
    traits=CAUSAL_OR_BIDIRECTIONAL,
    deviations=(
        "The convolution of the values spans as many modules as those of queries and keys; in the authors' code it "
        "spans one.",
    ),
)
class SparseQkv(Attention):
    class Config(Mixer.Config):
        heads: PositiveInt = 8
        """H, heads."""
        modules: PositiveInt | None = None
        """S, modules of a token, each with width / modules channels; null: as many as heads."""
        length_kernel: PositiveInt = 3
        """Tokens that the convolutions read; in a causal model they end at the token."""
        module_kernel: PositiveInt = 3
        """Modules that the convolutions read, the token's own in the middle: an odd number."""
        core: CoreSlot = Softmax.Config()
        """The attention core, q, k, v -> o."""
        shared_qk: bool | None = None
        """Whether queries and keys have one convolution (for hashing); null: as the core's paper has it, so true for
        `reformer` and false for others."""
        bias: bool = True
        """Whether the convolutions have biases."""
        output: bool = False
        """Whether a dense layer follows the heads, as in other attention."""
        scale: PositiveFloat | None = None
        """Factor of the scores q k^T; null: 1 / sqrt(width / heads)."""
        position: PositionSlot | None = None
        """Position encoding of this mixer, which acts on its queries and keys or scores; null: the model's."""
        dropout: FractionBelowOne = 0.0
        """Dropout probability of the attention weights."""

    mixes_heads = True

    refused_positions = RefusedPositions(
        ("scores",), "projects its embeddings as tokens, which have no neighbours here"
    )

    def __init__(self, config: Config, dims: Dims) -> None:
        super(Attention, self).__init__()
        heads, width = config.heads, dims.width
        self.width, self.head_width = width, width // heads
        self.cross = False
        self.causal = dims.causal
        self.dropout = config.dropout
        self.core_separates_documents = CORES.of(config.core).part.traits_of(config.core).documents
        core_shares = CORES.of(config.core).part.shares_qk(config.core)
        self.shared_qk = core_shares if config.shared_qk is None else config.shared_qk
        self.query_factor = None if config.scale is None else config.scale * self.head_width**0.5
        self.projection = QkvProjection(config, dims, shared_qk=self.shared_qk)
        self.output: Linear | None = None
        if config.output:
            self.output = Linear(
                width, width, ("width", "state"), dims.residual_init, bias=config.bias
            )
        self.core = CORES.build(config.core, dims, heads, self.head_width)
        self.position, self.uses_relative_bias, self.qk_norm_over = None, False, "head"
        self.build_position(config.position or dims.position, dims, heads, self.head_width)

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        if config.modules is not None:
            problems += must_divide(path, "modules", config.modules, "width", dims.width)
        if config.module_kernel % 2 == 0:
            what = f"module_kernel={config.module_kernel} has no middle"
            problems.append(
                Problem(
                    f"{path}.module_kernel",
                    what,
                    choices=take(config.module_kernel - 1, config.module_kernel + 1),
                )
            )
        return problems

    @property
    def query_channels(self) -> int:
        return self.width

    @property
    def key_channels(self) -> int:
        return self.width

    def project(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert memory is None, "`check` refuses a mask decoder of other mixers than attention"
        q, k, v = self.projection(x, tokens)
        return self._heads(q), self._heads(k), self._heads(v)

    def project_output(self, o: Tensor) -> Tensor:
        """Lay the heads' outputs [B, H, T, K] side by side: [B, T, D]."""
        joined = o.transpose(1, 2).flatten(2)
        return joined if self.output is None else self.output(joined)

    def multiply_adds(self, queries: int, keys: int) -> float:
        return (
            super().multiply_adds(queries, keys) + queries * self.projection.reused_multiply_adds()
        )
