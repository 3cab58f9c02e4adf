"""Dao and Gu 2024, Mamba-2: a selective state space model with one decay a head, by the state space dual form.

    z, x, B, C, s = W u,  x, B, C = silu(conv(x, B, C)),  step_t = softplus(s_t + bias)
    h_t = exp(-a step_t) h_(t-1) + step_t B_t x_t^T,  y_t = h_t^T C_t + D x_t     (section 2; listing 1)
    out = W_o norm(y * silu(z))                                                   (section 7.1)

Heads are of x; B and C are shared by the heads of a group, as keys and queries of multi-value attention are
(section 7.2). The state of a head is N x P. Training computes it by chunks, as linear attention with decay does.
"""

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import NonNegativeFloat, PositiveFloat, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import at_most, must_divide, take
from xscale.nn.attention.ops.chunked_scan import CHUNK
from xscale.nn.attention.ops.decayed_sums import DecayedSums
from xscale.nn.attention.ops.dense import upcast
from xscale.nn.dims import Dims
from xscale.nn.init import ONES
from xscale.nn.linear import Linear
from xscale.nn.mixer.mixer import CAUSAL, MIXERS, Mixer
from xscale.nn.mixer.recurrent_mixer import RecurrentMixer, StepDecay, check_steps
from xscale.nn.mixer.short_convolution import ShortConvolution
from xscale.nn.norm.norm import Norm
from xscale.nn.tokens import Tokens


@MIXERS.register(
    "mamba2",
    traits=CAUSAL,
    deviations=(
        "The projections start as those of the model's other layers do, normal with the model's deviation.",
        "The input projection is one map for each of z, x, B, C and the steps, so that tensor parallelism shards those "
        "of heads.",
    ),
)
class Mamba2(RecurrentMixer):
    skip: Parameter

    class Config(Mixer.Config):
        heads: PositiveInt = 8
        """H, heads of x, each with a state."""
        head_width: PositiveInt | None = None
        """P, width of a head; null: 2 * width / heads, the paper's expansion by two."""
        states: PositiveInt = 128
        """N, states of each channel of a head."""
        groups: PositiveInt = 1
        """Groups of heads, each with its own B and C, and its own norm before the output projection."""
        convolution: PositiveInt = 4
        """Tokens that the short causal convolution of x, B and C reads."""
        min_step: PositiveFloat = 0.001
        """Smallest initial step; the logarithms are uniform."""
        max_step: PositiveFloat = 0.1
        """Largest initial step."""
        min_rate: PositiveFloat = 1.0
        """Smallest initial rate of decay a; they are uniform."""
        max_rate: PositiveFloat = 16.0
        """Largest initial rate of decay."""
        eps: NonNegativeFloat = 1e-5
        """Added to the mean square in the norm before the output projection."""
        bias: bool = False
        """Whether the projections have biases."""

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        self.heads = config.heads
        self.groups = config.groups
        self.states = config.states
        self.head_width = config.head_width or 2 * dims.width // config.heads
        inner = self.heads * self.head_width
        shared = config.groups * config.states
        bias = config.bias
        self.gate = Linear.from_width(dims, inner, "heads", bias=bias)
        self.x = Linear.from_width(dims, inner, "heads", bias=bias)
        # All ranks of tp have the B and C of all groups: they are narrow, and there may be fewer groups than ranks.
        self.b = Linear.from_width(dims, shared, "state", bias=bias)
        self.c = Linear.from_width(dims, shared, "state", bias=bias)
        self.step = Linear.from_width(dims, self.heads, "heads")
        self.x_convolution = ShortConvolution(inner, "heads", config.convolution, bias=True)
        self.b_convolution = ShortConvolution(shared, "state", config.convolution, bias=True)
        self.c_convolution = ShortConvolution(shared, "state", config.convolution, bias=True)
        self.decay = StepDecay(
            self.heads, (config.min_rate, config.max_rate), (config.min_step, config.max_step)
        )
        self.declare("skip", (self.heads,), ("heads",), ONES, decays=False)
        self.norm = GroupRms(inner, config.groups, config.eps)
        self.o = Linear.to_width(dims, inner, "heads", bias=bias)

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path) + check_steps(config, path)
        if config.head_width is None:
            widths = take(max(2 * dims.width // config.heads, 1), key=f"{path}.head_width")
            problems += must_divide(
                path, "heads", config.heads, "2 * width", 2 * dims.width, *widths
            )
        problems += must_divide(path, "groups", config.groups, "heads", config.heads)
        if config.min_rate > config.max_rate:
            what = f"{config.min_rate} is more than max_rate={config.max_rate}"
            problems.append(at_most(f"{path}.min_rate", what, config.max_rate))
        return problems

    def forward(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        values = self.split_heads(
            self.x_convolution(self.x(x), tokens), self.head_width
        )  # [B, H, T, P]
        b = self._of_heads(self.b_convolution(self.b(x), tokens), values.shape[1])
        c = self._of_heads(self.c_convolution(self.c(x), tokens), values.shape[1])
        log_decay, step = self.decay(self.step(x))
        entered = (upcast(values) * step[..., None]).to(x.dtype)
        kernel = self.kernel_choices.get("linear_attention")
        y = self.scan(DecayedSums(c, b, entered, log_decay, tokens.documents, kernel), tokens)
        y = upcast(y) + upcast(self.use(self.skip))[:, None, None] * upcast(values)
        gated = y.transpose(1, 2).flatten(2) * F.silu(upcast(self.gate(x)))
        out: Tensor = self.o(self.norm_all_heads(self.norm, gated).to(x.dtype))
        return out

    def _of_heads(self, x: Tensor, heads: int) -> Tensor:
        """B or C of all groups [B, T, G * N] -> those of each local head, [B, H, T, N]."""
        groups = self.split_heads(x, self.states)
        if self.groups == 1:
            return groups.expand(-1, heads, -1, -1)
        return groups.repeat_interleave(self.heads // self.groups, 1).narrow(
            1, self.first_head, heads
        )

    @property
    def gathered_channels(self) -> int:
        return self.heads * self.head_width

    def transition_size(self) -> int:
        return self.states * self.head_width + 1

    def multiply_adds(self, queries: int, keys: int) -> float:
        chunk, width = min(CHUNK, queries), self.states + self.head_width
        scan = queries * (chunk * width + 2 * self.states * self.head_width)
        channels = self.heads * self.head_width + 2 * self.groups * self.states
        return float(self.heads * scan + queries * channels * (self.x_convolution.left + 1))


class GroupRms(Norm):
    """Root mean square norm over each of some groups of channels, with a gain for each channel."""

    weight: Parameter

    def __init__(self, channels: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.declare("weight", (channels,), ("width",), ONES, decays=False)

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        """[..., D] -> [..., D]."""
        grouped = x.view(*x.shape[:-1], self.groups, -1)
        normalised = F.rms_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(-2)
        return normalised * self.use(self.weight)
