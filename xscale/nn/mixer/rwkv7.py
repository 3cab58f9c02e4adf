"""Peng et al. 2025, RWKV-7 (Goose): time mixing by a generalised delta rule with a decay and a rate for each channel.

    x^c_t = u_t + (u_(t-1) - u_t) mu_c  for c in r, k, v, d, a, g                 (token shift)
    r, k, v = W x,  w = exp(-e^-0.5 sigmoid(lora_d(tanh))),  a = sigmoid(lora_a),  g = lora_g(sigmoid)
    v = v + (v_first - v) sigmoid(lora_v)  in all layers but the first, whose v is v_first
    kappa = k xi / |k xi| in each head,  k~ = k (1 + (a - 1) alpha)
    S_t = (diag(w_t) - (a_t kappa_t) kappa_t^T) S_(t-1) + k~_t v_t^T,  o_t = S_t^T r_t
    out = W_o (g * (norm(o_t) + (r_t . (rho k~_t)) v_t))

lora(f) is f(x A) B, with a bias for d, a and v; the norm is of each head. The state of a head is K x K. Training
computes it by chunks (`attention.ops.generalized_delta_rule`).
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveFloat, PositiveInt
from xscale.nn.attention.ops.decayed_sums import CHUNK
from xscale.nn.attention.ops.dense import upcast
from xscale.nn.attention.ops.generalized_delta_rule import GeneralizedDeltaRule
from xscale.nn.dims import Dims
from xscale.nn.init import ONES, ZEROS, Init
from xscale.nn.linear import Linear
from xscale.nn.mixer.mixer import CAUSAL, MIXERS, Mixer, ValueEdge
from xscale.nn.mixer.recurrent_mixer import RecurrentMixer
from xscale.nn.module import Module
from xscale.nn.neighbours import TokenShift
from xscale.nn.tokens import Tokens

SHIFTS = {"r": 0.2, "d": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
"""Names of the mixtures of a token with the one before it, and exponents by which their mu starts over the channels."""


@MIXERS.register(
    "rwkv7",
    traits=CAUSAL,
    deviations=(
        "The second matrices of the low-rank maps start normal, with the deviation of the authors' orthogonal ones.",
    ),
)
class Rwkv7(RecurrentMixer):
    removal: Parameter
    replacement: Parameter
    bonus: Parameter
    norm_weight: Parameter
    norm_bias: Parameter
    heads_make_width = True

    class Config(Mixer.Config):
        heads: PositiveInt = 8
        """H, heads, each with a state; a head is width / heads wide."""
        decay_latent_width: PositiveInt = 32
        """Width of the latent of the map to the decays."""
        rate_latent_width: PositiveInt = 32
        """Width of the latent of the map to the in-context learning rates a."""
        gate_latent_width: PositiveInt = 32
        """Width of the latent of the map to the output gate."""
        value_latent_width: PositiveInt | None = 32
        """Width of the latent of the map to the weights by which the values of the first layer of the stack with this
        mixer are mixed into those of the later ones; null: they are not mixed."""
        eps: PositiveFloat | None = None
        """Added to the variance in the norm of each head; null: 1e-5 * head width, as the authors' code."""

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        width = dims.width
        self.heads, self.head_width = config.heads, width // config.heads
        self.eps = config.eps or 1e-5 * self.head_width
        self.shift = TokenShift(width)
        depth = dims.layer / max(1, dims.depth - 1)
        for name, exponent in SHIFTS.items():
            rising = exponent * (1 - dims.layer / dims.depth)
            values = tuple(1 - (at / width) ** rising for at in range(width))
            self.declare(
                f"mix_{name}", (width,), ("width",), Init("values", values=values), decays=False
            )
        scale = width**-0.5
        starts = {"r": 0.5 * scale, "k": 0.05 * scale, "v": 0.5 * scale}
        self.r, self.k, self.v = (
            Linear(width, width, ("heads", "width"), Init("uniform", bounds=(-bound, bound)))
            for bound in starts.values()
        )
        speeds = tuple(
            -6.5 + 5 * (at / max(1, width - 1)) ** (0.85 + depth**0.5) for at in range(width)
        )
        self.decay_map = LatentMap(width, config.decay_latent_width, Init("values", values=speeds))
        self.rate_map = LatentMap(width, config.rate_latent_width, ZEROS)
        self.gate_map = LatentMap(width, config.gate_latent_width, None)
        self.value_latent_width = config.value_latent_width
        self.value_map: LatentMap | None = None
        """Map to the weights of the values of the first layer; None in that layer, or without such a mixture."""
        self.declare("removal", (width,), ("heads",), Init("constant", value=0.85), decays=False)
        self.declare("replacement", (width,), ("heads",), ONES, decays=False)
        self.declare("bonus", (width,), ("heads",), ZEROS, decays=False)
        gain = Init("constant", value=((1 + dims.layer) / dims.depth) ** 0.7)
        self.declare("norm_weight", (width,), ("heads",), gain, decays=False)
        self.declare("norm_bias", (width,), ("heads",), ZEROS, decays=False)
        self.o = Linear(width, width, ("width", "heads"), ZEROS)

    @property
    def hands_on_values(self) -> bool:
        return self.value_latent_width is not None

    @classmethod
    def values_key(cls, config: Config) -> str | None:
        return None if config.value_latent_width is None else "value_latent_width"

    def mix_first_values(self) -> None:
        assert self.value_latent_width is not None
        width = self.removal.shape[0]
        self.value_map = LatentMap(width, self.value_latent_width, ONES)

    def forward(
        self,
        x: Tensor,
        tokens: Tokens,
        memory: Tensor | None = None,
        source: Tokens | None = None,
        edge: ValueEdge | None = None,
    ) -> Tensor:
        change = self.shift(x, tokens) - x
        mixed = {name: x + change * self.use(self.get_parameter(f"mix_{name}")) for name in SHIFTS}
        r = self.r(mixed["r"])
        k = upcast(self.k(mixed["k"]))
        v = self._values(mixed["v"], edge)
        log_decay = -math.exp(-0.5) * upcast(self.decay_map(mixed["d"], torch.tanh)).sigmoid()
        rate = upcast(self.rate_map(mixed["a"])).sigmoid()
        gate = self.gate_map(mixed["g"], torch.sigmoid)
        removed = F.normalize(self._heads(k * upcast(self.use(self.removal))), dim=-1)
        k = k * (1 + (rate - 1) * upcast(self.use(self.replacement)))
        r, k, v, log_decay, rate = (
            self._heads(upcast(part)) for part in (r, k, v, log_decay, rate)
        )
        rule = GeneralizedDeltaRule(r, log_decay, k, v, -removed, rate * removed, tokens.documents)
        o = self.scan(rule, tokens).transpose(1, 2)  # [B, T, H, K]
        normalised = F.layer_norm(o, o.shape[-1:], eps=self.eps).flatten(2)
        normalised = normalised * upcast(self.use(self.norm_weight)) + upcast(
            self.use(self.norm_bias)
        )
        bonus = upcast(self.use(self.bonus)).view(-1, 1, self.head_width)
        added = (r * k * bonus).sum(-1, keepdim=True) * v  # [B, H, T, K]
        out: Tensor = self.o(
            ((normalised + added.transpose(1, 2).flatten(2)) * upcast(gate)).to(x.dtype)
        )
        return out

    def _values(self, x: Tensor, edge: ValueEdge | None) -> Tensor:
        """Return v of x [B, T, D], [B, T, D / R], in float32 at least; the first layer writes its own to the edge."""
        v = self.v(x)
        first = None if edge is None else edge.values
        if self.value_map is None:
            if edge is not None and first is None:
                edge.values = v
            return upcast(v)
        assert first is not None, "the first layer hands on its values"
        weight = upcast(self.value_map(x)).sigmoid()
        return torch.lerp(upcast(v), upcast(first), weight)

    def _heads(self, x: Tensor) -> Tensor:
        return self.split_heads(x, self.head_width)

    def transition_size(self) -> int:
        return 2 * self.head_width**2

    def multiply_adds(self, queries: int, keys: int) -> float:
        width, chunk = self.head_width, min(CHUNK, queries)
        # Half of four products of pairs, two of pairs with values, the system, its outputs; four with the state.
        pairs = 4 * width / 2 + 2 * width + width + width
        return float(self.heads * queries * (chunk * pairs + 5 * width * width))


class LatentMap(Module):
    """f(x A) B, and a bias if it has a start: from all channels [B, T, D] to those of the local heads."""

    def __init__(self, width: int, latent_width: int, bias: Init | None) -> None:
        super().__init__()
        self.down = Linear(width, latent_width, ("state", "width"), ZEROS)
        self.up = Linear(
            latent_width, width, ("heads", "state"), Init(std=0.1 * latent_width**-0.5)
        )
        self.bias: Tensor | None
        if bias is None:
            self.bias = None
        else:
            self.declare("bias", (width,), ("heads",), bias, decays=False)

    def forward(self, x: Tensor, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; `function` is f, the identity if None."""
        inner = self.down(x)
        y: Tensor = self.up(inner if function is None else function(inner))
        return y if self.bias is None else y + self.use(self.bias)
