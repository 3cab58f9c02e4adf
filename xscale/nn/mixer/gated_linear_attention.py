"""Yang et al. 2024, gated linear attention (GLA): linear attention with a decay for each channel of the keys.

    q, k, v = W u,  log a_t = log sigmoid(W_2 W_1 u_t + b) / tau,  r_t = swish(W_r u_t + b_r)
    S_t = diag(a_t) S_(t-1) + k_t v_t^T,  o_t = S_t^T q_t                         (section 4.1)
    out = W_o (r * norm(o))                                                       (section 4.4)

Queries and keys are half as wide as values, as in the paper's layer. The state of a head is K x V. Training computes it
by chunks whose pairs are split where no exponential overflows (`attention.ops.decayed_sums`).
"""

import torch.nn.functional as F
from torch import Tensor

from xscale.core.config import PositiveFloat, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import divisors, must_divide, take
from xscale.nn.attention.ops.decayed_sums import CHUNK, ChannelDecayedSums
from xscale.nn.attention.ops.dense import upcast
from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.mixer.mixer import CAUSAL, MIXERS, Mixer
from xscale.nn.mixer.recurrent_mixer import RecurrentMixer
from xscale.nn.norm.norm import NORMS, Layer, Norm, NormSlot
from xscale.nn.tokens import Tokens


@MIXERS.register(
    "gated_linear_attention",
    aliases=("gla",),
    traits=CAUSAL,
    deviations=(
        "The projections start as those of the model's other layers do, normal with the model's deviation.",
    ),
)
class GatedLinearAttention(RecurrentMixer):
    class Config(Mixer.Config):
        heads: PositiveInt = 4
        """H, heads, each with a state."""
        head_width: PositiveInt | None = None
        """K, width of a head's queries and keys; null: width / (2 * heads)."""
        value_width: PositiveInt | None = None
        """V, width of a head's values; null: width / heads."""
        gate_latent_width: PositiveInt = 16
        """Width of the latent of the map from a token to the decays of all channels."""
        temperature: PositiveFloat = 16.0
        """tau, by which the logarithm of the decay is divided; a larger one keeps longer."""
        norm: NormSlot = Layer.Config()
        """Norm of each head's output, before the gate."""

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        self.heads, self.temperature = config.heads, config.temperature
        self.head_width = config.head_width or dims.width // (2 * config.heads)
        self.value_width = config.value_width or dims.width // config.heads
        keys, values = self.heads * self.head_width, self.heads * self.value_width
        self.q = Linear.from_width(dims, keys, "heads")
        self.k = Linear.from_width(dims, keys, "heads")
        self.v = Linear.from_width(dims, values, "heads")
        # All ranks of tp have the few numbers that the decays of all heads come from.
        self.decay_down = Linear.from_width(dims, config.gate_latent_width, "state")
        self.decay_up = Linear(
            config.gate_latent_width, keys, ("heads", "state"), dims.init, bias=True
        )
        self.gate = Linear.from_width(dims, values, "heads", bias=True)
        self.norm: Norm = NORMS.build(config.norm, self.value_width)
        self.o = Linear.to_width(dims, values, "heads")

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        if config.head_width is None and dims.width % (2 * config.heads):
            what = f"2 * heads={2 * config.heads} does not divide width={dims.width}"
            widths = take(max(dims.width // (2 * config.heads), 1), key=f"{path}.head_width")
            choices = divisors(dims.width // 2) if dims.width % 2 == 0 else ()
            problems.append(Problem(f"{path}.heads", what, choices=choices + widths))
        if config.value_width is None:
            widths = take(max(dims.width // config.heads, 1), key=f"{path}.value_width")
            problems += must_divide(path, "heads", config.heads, "width", dims.width, *widths)
        return problems

    def forward(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        q, k = (self.split_heads(upcast(linear(x)), self.head_width) for linear in (self.q, self.k))
        v = self.split_heads(upcast(self.v(x)), self.value_width)  # [B, H, T, V]
        logits = self.split_heads(upcast(self.decay_up(self.decay_down(x))), self.head_width)
        log_decay = F.logsigmoid(logits) / self.temperature  # [B, H, T, K]
        o = self.scan(ChannelDecayedSums(q, k, v, log_decay, tokens.documents), tokens)
        gate = F.silu(upcast(self.gate(x)))
        gated = upcast(self.norm(o.transpose(1, 2).to(x.dtype))).flatten(2) * gate  # [B, T, H * V]
        out: Tensor = self.o(gated.to(x.dtype))
        return out

    def transition_size(self) -> int:
        return self.head_width * (self.value_width + 1)

    def multiply_adds(self, queries: int, keys: int) -> float:
        chunk = min(CHUNK, queries)
        pairs = self.head_width / 2 + self.value_width
        return float(
            self.heads * queries * (chunk * pairs + 2 * self.head_width * self.value_width)
        )
