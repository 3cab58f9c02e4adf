"""Yang, Kautz and Hatamizadeh 2024, gated delta networks: the delta rule, with a decay of the whole state.

    q, k, v = silu(conv(W u)),  q and k of length 1,  b_t = sigmoid(W_b u_t),  log a_t = -r softplus(W_a u_t + bias)
    S_t = a_t (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T,  o_t = S_t^T q_t / sqrt(K)      (eq. 10)
    out = W_o (norm(o) * silu(W_g u))                                                      (section 3.4)

The decay clears the state of a head; the delta rule replaces what is stored at one key. A key head may serve several
value heads. The state of a value head is K x V. Training computes it by chunks (the operator `delta_rule`).
"""

import torch.nn.functional as F
from torch import Tensor

from xscale.core.config import PositiveFloat, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import must_divide, take
from xscale.nn.attention.ops.delta_rule import CHUNK, DeltaRule
from xscale.nn.attention.ops.dense import repeat_kv, upcast
from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.mixer.mixer import CAUSAL, MIXERS, Mixer
from xscale.nn.mixer.recurrent_mixer import RecurrentMixer, StepDecay, check_steps
from xscale.nn.mixer.short_convolution import ShortConvolution
from xscale.nn.norm.norm import NORMS, Norm, NormSlot, Rms
from xscale.nn.tokens import Tokens


@MIXERS.register(
    "gated_delta_net",
    traits=CAUSAL,
    deviations=(
        "The projections start as those of the model's other layers do, normal with the model's deviation.",
    ),
)
class GatedDeltaNet(RecurrentMixer):
    class Config(Mixer.Config):
        heads: PositiveInt = 8
        """H, heads of the values, each with a state, a decay and a strength."""
        key_heads: PositiveInt | None = None
        """Heads of queries and keys, each for heads / key_heads heads of values; null: as many as heads."""
        head_width: PositiveInt | None = None
        """K, width of a head's queries and keys; null: 3 / 4 * width / heads, rounded down."""
        value_width: PositiveInt | None = None
        """V, width of a head's values; null: twice that of its keys."""
        convolution: PositiveInt = 4
        """Tokens that the short causal convolution of queries, keys and values reads."""
        min_step: PositiveFloat = 0.001
        """Smallest initial step of the decay; the logarithms are uniform."""
        max_step: PositiveFloat = 0.1
        """Largest initial step of the decay."""
        min_rate: PositiveFloat = 0.01
        """Smallest initial rate of decay r; they are uniform."""
        max_rate: PositiveFloat = 16.0
        """Largest initial rate of decay."""
        norm: NormSlot = Rms.Config(eps=1e-5)
        """Norm of each head's output, before the gate."""

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        self.heads, self.key_heads = config.heads, config.key_heads or config.heads
        self.head_width = config.head_width or max(1, 3 * dims.width // (4 * config.heads))
        self.value_width = config.value_width or 2 * self.head_width
        keys, values = self.key_heads * self.head_width, self.heads * self.value_width
        self.q = Linear.from_width(dims, keys, "heads")
        self.k = Linear.from_width(dims, keys, "heads")
        self.v = Linear.from_width(dims, values, "heads")
        self.gate = Linear.from_width(dims, values, "heads")
        self.step = Linear.from_width(dims, self.heads, "heads")
        self.strength = Linear.from_width(dims, self.heads, "heads")
        self.q_convolution = ShortConvolution(keys, "heads", config.convolution)
        self.k_convolution = ShortConvolution(keys, "heads", config.convolution)
        self.v_convolution = ShortConvolution(values, "heads", config.convolution)
        self.decay = StepDecay(
            self.heads, (config.min_rate, config.max_rate), (config.min_step, config.max_step)
        )
        self.norm: Norm = NORMS.build(config.norm, self.value_width)
        self.o = Linear.to_width(dims, values, "heads")

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path) + check_steps(config, path)
        key_heads = config.key_heads or config.heads
        return problems + must_divide(
            path, "key_heads", key_heads, "heads", config.heads, *take(None)
        )

    def forward(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        q = self.split_heads(self.q_convolution(self.q(x), tokens), self.head_width)
        k = self.split_heads(self.k_convolution(self.k(x), tokens), self.head_width)
        v = self.split_heads(
            self.v_convolution(self.v(x), tokens), self.value_width
        )  # [B, H, T, V]
        q, k = unit_length(upcast(q)) * self.head_width**-0.5, unit_length(upcast(k))
        q, k = repeat_kv(q, v.shape[1]), repeat_kv(k, v.shape[1])  # [B, H, T, K]
        log_decay, _ = self.decay(self.step(x))
        strength = upcast(self.strength(x)).sigmoid().transpose(1, 2)  # [B, H, T]
        kernel = self.kernel_choices.get("delta_rule")
        rule = DeltaRule(
            q.to(v.dtype), k.to(v.dtype), v, strength, log_decay, tokens.documents, kernel
        )
        o = self.scan(rule, tokens)
        gate = F.silu(upcast(self.gate(x)))
        gated = upcast(self.norm(o.transpose(1, 2).to(x.dtype))).flatten(2) * gate  # [B, T, H * V]
        out: Tensor = self.o(gated.to(x.dtype))
        return out

    @property
    def head_counts(self) -> dict[str, int]:
        return {"heads": self.heads, "key_heads": self.key_heads}

    def transition_size(self) -> int:
        return self.head_width * (self.head_width + self.value_width)

    def multiply_adds(self, queries: int, keys: int) -> float:
        width, chunk = self.head_width, min(CHUNK, queries)
        # Two products of keys, the solution of the chunk's system, its outputs, and three products with the state.
        pairs = 2 * width + (width + self.value_width) / 2 + self.value_width
        scan = queries * (chunk * pairs + 3 * width * self.value_width)
        channels = 2 * self.key_heads * width + self.heads * self.value_width
        return float(self.heads * scan + queries * channels * (self.q_convolution.left + 1))


def unit_length(x: Tensor) -> Tensor:
    """Divide each row [..., K] by its length."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
