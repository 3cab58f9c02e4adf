"""Gu et al. 2022, S4: a linear state space model of each channel, as a long convolution or as a recurrence.

    x'(t) = A x(t) + B u(t),  y(t) = C x(t) + D u(t)                              (eq. 1)
    x_k = Abar x_{k-1} + Bbar u_k,  y_k = C x_k + D u_k                           (eq. 3)
    Abar = (I - step/2 A)^-1 (I + step/2 A),  Bbar = (I - step/2 A)^-1 step B     (bilinear)
    y = K * u + D u,  K_k = C Abar^k Bbar                                         (eq. 4, 5)

A starts as HiPPO-LegS (eq. 2), in the basis where it is diagonal plus rank one, A = diag(lambda) - P P^* (theorem 1).
Training has K from its generating function at the roots of unity, by four Cauchy products (algorithm 1) and an inverse
FFT; the parameter is C~ = C (I - Abar^L) for a kernel of L tokens. Generation recurs, in O(states) a token and channel.
A chunk of a sequence is a convolution by FFT and the response to the state before it (`Chunk`).
The layer's output is GELU(y) W + b, which mixes the channels.

Eigenvalues come in conjugate pairs, of which one each is stored: sums over states are twice the real part. Complex
parameters are pairs of real ones, in master precision.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xscale.core.config import PositiveFloat, PositiveInt
from xscale.core.errors import ConfigError, Problem
from xscale.core.requirements import at_least, at_most, take
from xscale.nn.attention.ops.dense import upcast
from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.mixer.mixer import CAUSAL, MIXERS, Mixer
from xscale.nn.mixer.state_space import Chunk, StateSpace
from xscale.nn.mixer.without_padding import require_one_document
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


def convolve(u: Tensor, kernel: Tensor) -> Tensor:
    """K * u by FFT: u [B, T, D], K [D, T] -> [B, T, D]."""
    length = u.shape[1]
    spectrum = torch.fft.rfft(u.mT, n=2 * length) * torch.fft.rfft(kernel.to(u.dtype), n=2 * length)
    y: Tensor = torch.fft.irfft(spectrum, n=2 * length)
    return y[..., :length].mT


@MIXERS.register(
    "s4",
    traits=replace(CAUSAL, documents=False),
    deviations=(
        "The real parts of the eigenvalues stay negative, as exponentials, as in the authors' later code.",
        "A prompt is read by the recurrence token by token.",
    ),
)
class S4(Mixer):
    class Config(Mixer.Config):
        states: int = Field(default=64, ge=2, multiple_of=2)
        """N, states of a channel."""
        length: PositiveInt | None = None
        """Tokens of the convolution kernel; null: the data's sequence length."""
        min_step: PositiveFloat = 0.001
        """Smallest initial discretisation step; the logarithms are uniform."""
        max_step: PositiveFloat = 0.1
        """Largest initial discretisation step."""
        bias: bool = True
        """Whether the linear map after the convolution has a bias."""

    seams = {"convolve": Role.CONVOLUTION, "first_hidden": Role.FIRST_HIDDEN}
    uses_position = False
    shards_sequence = True

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        self.first_hidden = 0
        """Index in the model of the first local channel: set when channels are sharded over ranks."""
        length = config.length or dims.length
        self.ssm = StateSpace(dims.width, config.states, length, (config.min_step, config.max_step))
        self.o = Linear.to_width(dims, dims.width, "ffn", bias=config.bias)

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        if config.length is not None and config.length < dims.length:
            what = f"the kernel has {config.length} tokens, and a sequence has {dims.length}"
            problems.append(at_least(f"{path}.length", what, dims.length, *take(None)))
        if config.min_step > config.max_step:
            what = f"{config.min_step} is more than max_step={config.max_step}"
            problems.append(at_most(f"{path}.min_step", what, config.max_step))
        return problems

    def forward(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        require_one_document(self.path, tokens)
        skip = self.ssm.use(self.ssm.skip)
        u = upcast(x.narrow(-1, self.first_hidden, len(skip)))  # [B, T, D]
        y = (
            self.convolve(u, tokens)
            if tokens.forward.cache is None
            else self.recur(u, tokens.forward.cache)
        )
        out: Tensor = self.o(F.gelu(y + skip * u).to(x.dtype))
        return out

    def convolve(self, u: Tensor, tokens: Tokens) -> Tensor:
        """K * u, u [B, T, D] -> [B, T, D]. A seam: where the sequence is sharded, other ranks have tokens before u."""
        self.check_length(u.shape[1])
        return convolve(u, self.ssm.kernel()[:, : u.shape[1]])

    @property
    def hidden_units(self) -> int:
        """Channels, each with a state space of its own, of all ranks."""
        return len(self.ssm.skip)

    def chunk(self, length: int) -> Chunk:
        """Return the state space models over `length` adjacent tokens of a longer sequence."""
        return Chunk(self.ssm, length)

    @property
    def state_elements(self) -> int:
        """Numbers of the states of all channels, which a shard of a sequence sends to each other one."""
        channels, pairs = self.ssm.log_decay.shape
        return channels * 2 * pairs

    def check_length(self, length: int) -> None:
        """Raise a ConfigError when a sequence of `length` tokens is longer than the kernel."""
        if length > self.ssm.length:
            what = f"{self.path} has a kernel of {self.ssm.length} tokens, and the sequence has {length}"
            fix = f"Take a sequence of at most {self.ssm.length} tokens, or train with length={length} or more."
            raise ConfigError("data.sequence_length", what, fix)

    def recur(self, u: Tensor, cache: dict[str, Any]) -> Tensor:
        """Outputs of the recurrence for the new tokens u [B, T, D]; the cache has C and the state."""
        if self.path not in cache:
            c = self.ssm.output_matrix()
            cache[self.path] = (c, c.new_zeros(len(u), *c.shape))
        c, state = cache[self.path]
        outputs = []
        for token in u.unbind(1):
            y, state = self.ssm.advance(token, state, c)
            outputs.append(y)
        cache[self.path] = (c, state)
        return torch.stack(outputs, 1).to(u.dtype)

    def multiply_adds(self, queries: int, keys: int) -> float:
        # Two real FFTs of twice the sequence. The kernel, by Cauchy products and two more, is computed once for all
        # samples of a micro-batch, and left out.
        return len(self.ssm.skip) * 2.0 * 2 * queries * math.log2(2 * queries)
