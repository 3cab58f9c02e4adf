"""Mixers whose weights belong to the positions of a sequence of fixed length: gMLP and MLP-Mixer.

`gmlp`, Liu et al. 2021, section 2: a spatial gating unit (SGU) between two projections of channels.

    Z = GELU(x U),  [Z_1; Z_2] = Z,  s(Z) = Z_1 * (W LN(Z_2) + b),  y = s(Z) V

W [N, N] mixes positions and is the same for all channels; in a causal model its upper triangle is 0. W starts near 0
and b at 1, so that the block starts as a feed-forward network. It is a whole layer: the paper's block has no other.
With `attention` (aMLP, section 4.3) s(Z) = Z_1 * (W LN(Z_2) + b + A(x)), A a small head of attention.

`mlp_mixer`, Tolstikhin et al. 2021, eq. 1: a perceptron along the tokens, the same for all channels.

    y_:,c = W_2 GELU(W_1 x_:,c + b_1) + b_2,  W_1 [S', N], W_2 [N, S']

Shorter sequences than N use the first rows and columns; longer ones fail.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.dims import Dims, check_trained_length
from xscale.nn.init import ONES, ZEROS, Init
from xscale.nn.linear import Linear
from xscale.nn.mixer.mixer import BIDIRECTIONAL, CAUSAL_OR_BIDIRECTIONAL, MIXERS, Mixer
from xscale.nn.mixer.synthesizer import ValueCache
from xscale.nn.mixer.tiny_attention import TinyAttention
from xscale.nn.mixer.without_padding import without_padding
from xscale.nn.norm.norm import Layer, Norm
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


class PositionalMixer(Mixer):
    """A mixer with weights for each of `length` positions."""

    class Config(Mixer.Config):
        length: PositiveInt | None = None
        """N, positions that have weights: the data's sequence length, which null stands for."""

    uses_position = False
    length: int

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        if config.length in (None, dims.length):
            return problems
        what = f"the weights belong to {config.length} positions, and a sequence has {dims.length} tokens"
        return [*problems, Problem(f"{path}.length", what, choices=take(dims.length, None))]


@MIXERS.register(
    "gmlp",
    traits=replace(CAUSAL_OR_BIDIRECTIONAL, padding=True, documents=False),
)
class Gmlp(PositionalMixer):
    """Liu et al. 2021 (gMLP): a linear map over the positions gates the other half of the channels."""

    spatial: Parameter
    spatial_bias: Parameter

    class Config(PositionalMixer.Config):
        hidden: int | None = Field(default=None, ge=2, multiple_of=2)
        """F, channels of Z, of which half are the gate; null: six times the model's width, as the paper's BERT."""
        toeplitz: bool = False
        """Whether the weights depend on the distance of two positions alone; the paper finds that they become so."""
        bias: bool = True
        """Whether the two projections of channels have biases."""
        attention: PositiveInt | None = None
        """A, width of a head of attention beside the map over the positions (aMLP); null: none. The paper: 64."""

    seams = {"norm_all_heads": Role.NORM_OVER_HEADS}

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        self.causal, self.toeplitz = dims.causal, config.toeplitz
        self.length = config.length or dims.length
        half = (config.hidden or 6 * dims.width) // 2
        # Z_1 and Z_2 are sharded over ranks in the same way.
        self.up, self.up_gate = (
            Linear.from_width(dims, half, "ffn", bias=config.bias) for _ in range(2)
        )
        self.down = Linear.to_width(dims, half, "ffn", bias=config.bias)
        self.norm: Norm = Layer(Layer.Config(), half)
        # A row sums N normalised values: the gates start at 1 +- dims.std.
        start = Init(std=dims.std / self.length**0.5)
        if config.toeplitz:
            shape: tuple[int, ...] = (self.length if dims.causal else 2 * self.length - 1,)
            self.declare("spatial", shape, ("tokens",), start)
        else:
            self.declare("spatial", (self.length, self.length), ("tokens", "tokens"), start)
        self.declare("spatial_bias", (self.length,), ("tokens",), ONES, decays=False)
        self.attention: TinyAttention | None = None
        if config.attention is not None:
            self.attention = TinyAttention(dims, config.attention, half, bias=config.bias)

    @without_padding
    def forward(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        gate = self.norm_all_heads(self.norm, F.gelu(self.up_gate(x)))  # [B, T, F / 2]
        queries = gate.shape[1]
        if tokens.forward.cache is not None:
            if self.path not in tokens.forward.cache:
                tokens.forward.cache[self.path] = ValueCache()
            gate = tokens.forward.cache[self.path].append(gate[:, None])[:, 0]  # [B, S, F / 2]
        keys = gate.shape[1]
        check_trained_length(self.path, keys, self.length)
        weights = self.weights(keys).narrow(0, keys - queries, queries)  # [T, S]
        bias = self.use(self.spatial_bias)[keys - queries : keys, None]
        mixed = weights @ gate + bias
        if self.attention is not None:
            mixed = mixed + self.attention(x, self._attention_cache(tokens))
        out: Tensor = self.down(F.gelu(self.up(x)) * mixed)
        return out

    def _attention_cache(self, tokens: Tokens) -> ValueCache | None:
        cache = tokens.forward.cache
        if cache is None:
            return None
        cached: ValueCache = cache.setdefault(f"{self.path}.attention", ValueCache())
        return cached

    def weights(self, length: int) -> Tensor:
        """W of the first positions, [T, T]; 0 where a causal model may not look."""
        spatial = self.use(self.spatial)
        if self.toeplitz:
            places = torch.arange(length, device=spatial.device)
            distance = places[:, None] - places  # [T, T]
            spatial = spatial[distance.clamp(min=0) if self.causal else distance + self.length - 1]
        spatial = spatial[:length, :length]
        return spatial.tril() if self.causal else spatial

    def norm_all_heads(self, norm: Norm, x: Tensor) -> Tensor:
        """norm(x), x [B, T, F / 2]. A seam: the norm is over all channels, of which tensor parallelism has some."""
        out: Tensor = norm(x)
        return out

    @property
    def gathered_channels(self) -> int:
        return len(self.up.weight)

    def multiply_adds(self, queries: int, keys: int) -> float:
        mixing = float(self.up.weight.shape[0]) * queries * keys / (2 if self.causal else 1)
        return mixing + (
            0 if self.attention is None else self.attention.multiply_adds(queries, keys)
        )


@MIXERS.register(
    "mlp_mixer",
    traits=BIDIRECTIONAL,
)
class MlpMixer(PositionalMixer):
    """Tolstikhin et al. 2021 (MLP-Mixer): a perceptron over the positions, the same for all channels."""

    up: Parameter
    up_bias: Parameter
    down: Parameter
    down_bias: Parameter

    class Config(PositionalMixer.Config):
        hidden: PositiveInt | None = None
        """S', hidden width of the perceptron along the tokens; null: half of the model's width, as in the paper."""

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        self.length, self.width = config.length or dims.length, dims.width
        hidden = config.hidden or max(1, dims.width // 2)
        self.declare("up", (hidden, self.length), ("ffn", "tokens"), dims.init)
        self.declare("up_bias", (hidden,), ("ffn",), ZEROS, decays=False)
        self.declare("down", (self.length, hidden), ("tokens", "ffn"), dims.residual_init)
        self.declare("down_bias", (self.length,), ("tokens",), ZEROS, decays=False)

    @without_padding
    def forward(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        length = x.shape[1]
        check_trained_length(self.path, length, self.length)
        hidden = F.gelu(
            self.use(self.up)[:, :length] @ x + self.use(self.up_bias)[:, None]
        )  # [B, S', D]
        return self.use(self.down)[:length] @ hidden + self.use(self.down_bias)[:length, None]

    def multiply_adds(self, queries: int, keys: int) -> float:
        return 2.0 * self.up.shape[0] * self.width * queries
