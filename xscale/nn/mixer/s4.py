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
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn import Parameter

from xscale.core.errors import ConfigError, Problem
from xscale.core.requirements import at_least, at_most, take
from xscale.nn.attention.ops.dense import upcast
from xscale.nn.compiling.traceable_property import TraceableProperty
from xscale.nn.dims import Dims
from xscale.nn.init import ONES, Init
from xscale.nn.linear import Linear
from xscale.nn.mixer.mixer import MIXERS, Mixer, MixerTraits
from xscale.nn.mixer.without_padding import require_one_document
from xscale.nn.module import Module
from xscale.nn.roles import Role, Seams
from xscale.nn.tokens import Tokens

Array = NDArray[Any]
FREQUENCIES = 256
"""Frequencies of a kernel that a CPU computes at a time."""


def hippo_legs(states: int) -> tuple[Array, Array]:
    """A [N, N] and B [N] of HiPPO-LegS (eq. 2)."""
    n = np.arange(states)
    b = np.sqrt(2 * n + 1)
    return -np.tril(np.outer(b, b), -1) - np.diag(n + 1), b


def diagonal_plus_correction(states: int) -> tuple[Array, Array, Array]:
    """HiPPO-LegS as diag(lambda) - P P^*: lambda, P and B, one of each conjugate pair, complex [N / 2]."""
    a, b = hippo_legs(states)
    p = np.sqrt(np.arange(states) + 0.5)
    # A + P P^T is -1/2 I and a skew-symmetric matrix: its eigenvectors are orthogonal.
    frequencies, basis = np.linalg.eigh(-1j * (a + np.outer(p, p) + 0.5 * np.eye(states)))
    # An eigenvector is known to a phase: the first entries become real and positive.
    basis = basis[:, frequencies > 0]
    basis = basis * (np.abs(basis[:1]) / basis[:1])
    return -0.5 + 1j * frequencies[frequencies > 0], basis.conj().T @ p, basis.conj().T @ b


class StateSpace(Module):
    """The state space models of D channels, N states each, of which one of each conjugate pair is stored."""

    keeps_precision = True
    log_decay: Parameter
    frequency: Parameter
    correction_real: Parameter
    correction_imaginary: Parameter
    b_real: Parameter
    b_imaginary: Parameter
    c_real: Parameter
    c_imaginary: Parameter
    skip: Parameter
    log_step: Parameter

    def __init__(self, channels: int, states: int, length: int, steps: tuple[float, float]) -> None:
        super().__init__()
        self.length = length
        eigenvalues, correction, b = diagonal_plus_correction(states)
        starts = {
            "log_decay": _values(np.log(-eigenvalues.real)),
            "frequency": _values(eigenvalues.imag),
            "correction_real": _values(correction.real),
            "correction_imaginary": _values(correction.imag),
            "b_real": _values(b.real),
            "b_imaginary": _values(b.imag),
            "c_real": Init(std=0.5**0.5),
            "c_imaginary": Init(std=0.5**0.5),
        }
        for name, init in starts.items():
            self.declare(name, (channels, states // 2), ("ffn", "state"), init, decays=False)
        self.declare("skip", (channels,), ("ffn",), ONES, decays=False)
        bounds = (math.log(steps[0]), math.log(steps[1]))
        self.declare(
            "log_step", (channels,), ("ffn",), Init("uniform", bounds=bounds), decays=False
        )

    def matrices(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Lambda, P, B and C~ [D, N / 2], complex, and the steps [D]."""
        decay = upcast(self.use(self.log_decay)).exp()
        eigenvalues = torch.complex(-decay, self.use(self.frequency).to(decay.dtype))
        correction, b, c = (
            torch.complex(upcast(self.use(real)), upcast(self.use(imaginary)))
            for real, imaginary in (
                (self.correction_real, self.correction_imaginary),
                (self.b_real, self.b_imaginary),
                (self.c_real, self.c_imaginary),
            )
        )
        return eigenvalues, correction, b, c, upcast(self.use(self.log_step)).exp()

    def kernel(self) -> Tensor:
        """K of all `length` positions, [D, length]."""
        return self.kernel_of(self.matrices()[3], self.length)

    def kernel_of(self, c: Tensor, length: int) -> Tensor:
        """K of the first `length` positions [D, length] for C~ = C (I - Abar^length), [D, N / 2] (algorithm 1)."""
        eigenvalues, correction, b, _, step = self.matrices()
        frequencies = torch.arange(length // 2 + 1, device=step.device, dtype=step.dtype)
        angles = -2 * math.pi * frequencies / length
        roots = torch.complex(angles.cos(), angles.sin())
        # v / (s - lambda q) and its conjugate pair are 2 (s Re v - q Re(v conj(lambda))) over the product of both.
        weights = torch.stack(
            (c * b, c * correction, correction.conj() * b, correction.conj() * correction), 1
        )  # [D, 4, N / 2]
        numerators = weights.real, (weights * eigenvalues.conj()[:, None]).real
        # A CPU takes some frequencies at a time, whose products with all states fit into its cache.
        size = FREQUENCIES if step.device.type == "cpu" else len(roots)
        spectrum = [
            _spectrum(part, eigenvalues, numerators, step) for part in torch.split(roots, size)
        ]
        kernel: Tensor = torch.fft.irfft(torch.cat(spectrum, 1), n=length)
        return kernel

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Abar [D, N, N], Bbar and C [D, N] of the states' real parts, followed by their imaginary ones, in double.

        A is diag(lambda) - P P^* and its conjugate pair in that basis: symmetric but for the frequencies.
        """
        eigenvalues, correction, b, c, step = self.matrices()
        decay, frequency = (
            torch.diag_embed(x.double()) for x in (eigenvalues.real, eigenvalues.imag)
        )
        correction = _real(correction)
        a = torch.cat((torch.cat((decay, -frequency), 2), torch.cat((frequency, decay), 2)), 1)
        half = (
            step.double()[:, None, None]
            / 2
            * (a - 2 * correction[:, :, None] * correction[:, None])
        )
        eye = torch.eye(a.shape[1], dtype=a.dtype, device=a.device)
        right = torch.cat((eye + half, step.double()[:, None, None] * _real(b)[..., None]), 2)
        solved = torch.linalg.solve(eye - half, right)
        abar, bbar = solved[..., :-1], solved[..., -1]
        # y is twice the real part of C x.
        shortened = 2 * _real(c.conj())
        return abar, bbar, torch.linalg.solve((eye - _power(abar, self.length)).mT, shortened)

    def output_matrix(self) -> Tensor:
        """C = C~ (I - Abar^length)^-1 [D, N / 2], complex: a dense power for each channel, once before generation."""
        return _paired(self.dense()[2]).to(self.matrices()[3].dtype)

    def advance(self, u: Tensor, state: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """One step of the recurrence: input u [B, D], state [B, D, N / 2], C [D, N / 2] -> y [B, D] and the new state.

        (2/step - A)^-1 by the Woodbury identity, so that Abar is never stored.
        """
        eigenvalues, correction, b, _, step = self.matrices()
        twice = 2 / step[:, None]  # [D, 1]
        resolvent = 1 / (twice - eigenvalues)
        y = (
            (twice + eigenvalues) * state
            - correction * _pair_sum(correction.conj() * state)
            + 2 * b * u[..., None]
        )
        y = resolvent * y
        inner = 1 + _pair_sum(correction.conj() * resolvent * correction)
        state = y - resolvent * correction * (_pair_sum(correction.conj() * y) / inner)
        return _pair_sum(c * state).squeeze(-1), state


def _spectrum(
    roots: Tensor, eigenvalues: Tensor, numerators: tuple[Tensor, Tensor], step: Tensor
) -> Tensor:
    """Fourier transform of the kernels at the roots of unity [F]: [D, F]."""
    # 2 (1 - z) / step - lambda (1 + z): the resolvent without its pole at z = -1.
    s, q = 2 * (1 - roots) / step[:, None], 1 + roots  # [D, F], [F]
    real, square = eigenvalues.real[..., None], eigenvalues.abs().square()[..., None]
    pairs = 1 / ((s * s)[:, None] - 2 * real * (s * q)[:, None] + square * (q * q))  # [D, N / 2, F]
    first, second = (numerator.to(pairs.dtype) @ pairs for numerator in numerators)
    cauchy = 2 * (s[:, None] * first - q * second)  # [D, 4, F]
    k00, k01, k10, k11 = cauchy.unbind(1)
    return 2 * (k00 - k01 * q * k10 / (1 + q * k11))


@dataclass
class Chunk:
    """State space models over `length` adjacent tokens of a longer sequence; a state is N real numbers.

    The tokens go in blocks of about N, so that the states of single tokens are not stored: the states at the ends of
    blocks come from a tree of products with Abar^block, Abar^(2 block) ...
    """

    ssm: StateSpace
    length: int

    def __post_init__(self) -> None:
        abar, self.bbar, self.c = self.ssm.dense()
        self.squares = [abar]
        """Abar^(2^i), [D, N, N]."""
        while 2 ** len(self.squares) < self.length:
            self.squares.append(self.squares[-1] @ self.squares[-1])
        # A power of two: all powers of Abar that are needed are squares.
        self.levels = min(math.ceil(math.log2(abar.shape[1])), len(self.squares) - 1)

    @TraceableProperty
    def power(self) -> Tensor:
        """Abar^length [D, N, N]."""
        return _power(self.squares[0], self.length)

    def advance_state(self, state: Tensor) -> Tensor:
        """Return what the state [B, D, N] before the chunk is after it, without inputs: Abar^length state."""
        return _product(self.power, state.transpose(0, 1)[:, :, None])[:, :, 0].transpose(0, 1)

    def kernel(self) -> Tensor:
        """K of the chunk's positions [D, length]."""
        shortened = self.c - (self.power.mT @ self.c[..., None])[..., 0]
        return self.ssm.kernel_of(_paired(shortened).to(self.ssm.matrices()[3].dtype), self.length)

    def end_state(self, u: Tensor) -> Tensor:
        """Return the state [B, D, N] after inputs u [B, length, D] to zeros: sum_j Abar^(length - 1 - j) Bbar u_j."""
        weights = self._block(self.bbar, transposed=False).flip(1)  # [D, block, N]
        block = weights.shape[1]
        padded = F.pad(u, (0, 0, -u.shape[1] % block, 0))
        inputs = padded.reshape(len(u), -1, block, u.shape[2])  # [B, n, block, D]
        states = torch.einsum("bnkd,dks->dbns", inputs, weights.to(u.dtype))
        for square in self.squares[self.levels :]:
            if states.shape[2] == 1:
                break
            states = F.pad(states, (0, 0, states.shape[2] % 2, 0))
            states = _product(square, states[:, :, ::2]) + states[:, :, 1::2]
        return states.squeeze(2).transpose(0, 1)

    def response(self, state: Tensor) -> Tensor:
        """Return what the state [B, D, N] before the chunk adds to its outputs [B, length, D]: C Abar^(i + 1) state."""
        outputs = self._block(self.c, transposed=True)  # [D, block, N]
        blocks = -(-self.length // outputs.shape[1])
        states = _product(self.squares[0], state.transpose(0, 1)[:, :, None])  # [D, B, 1, N]
        for square in self.squares[self.levels :]:
            if states.shape[2] < blocks:
                states = torch.cat((states, _product(square, states)), 2)
        y = torch.einsum("dbns,dks->bnkd", states[:, :, :blocks], outputs.to(state.dtype))
        return y.flatten(1, 2)[:, : self.length]

    def _block(self, first: Tensor, transposed: bool) -> Tensor:
        """Abar^i first, or `transposed` first Abar^i, for the i of a block: [D, block, N]."""
        block = first[:, None]
        for square in self.squares[: self.levels]:
            block = torch.cat((block, block @ (square if transposed else square.mT)), 1)
        return block


def convolve(u: Tensor, kernel: Tensor) -> Tensor:
    """K * u by FFT: u [B, T, D], K [D, T] -> [B, T, D]."""
    length = u.shape[1]
    spectrum = torch.fft.rfft(u.mT, n=2 * length) * torch.fft.rfft(kernel.to(u.dtype), n=2 * length)
    y: Tensor = torch.fft.irfft(spectrum, n=2 * length)
    return y[..., :length].mT


def _power(x: Tensor, exponent: int) -> Tensor:
    power: Tensor = torch.linalg.matrix_power(x, exponent)
    return power


def _product(matrix: Tensor, states: Tensor) -> Tensor:
    """matrix [D, N, N] times each state [D, B, n, N]."""
    return (states.flatten(1, 2) @ matrix.mT.to(states.dtype)).view(states.shape)


def _real(x: Tensor) -> Tensor:
    """Complex [D, N / 2] -> real and imaginary parts [D, N], in double."""
    return torch.cat((x.real, x.imag), 1).double()


def _paired(c: Tensor) -> Tensor:
    """C of real states [D, N] -> that of one of each conjugate pair, complex [D, N / 2]."""
    real, imaginary = c.chunk(2, 1)
    return torch.complex(real, -imaginary) / 2


def _values(x: Array) -> Init:
    return Init("values", values=tuple(x.tolist()))


def _pair_sum(x: Tensor) -> Tensor:
    """Sum over the last axis of x [..., N / 2] and its conjugates: real [..., 1]."""
    return 2 * x.real.sum(-1, keepdim=True)


@MIXERS.register(
    "s4",
    traits=MixerTraits(causal=True, bidirectional=False, cross=False, documents=False, decode=True),
    deviations=(
        "The real parts of the eigenvalues stay negative, as exponentials, as in the authors' later code.",
        "A prompt is read by the recurrence token by token.",
    ),
)
class S4(Mixer):
    class Config(Mixer.Config):
        states: int = Field(default=64, ge=2, multiple_of=2)
        """N, states of a channel."""
        length: int | None = Field(default=None, ge=1)
        """Tokens of the convolution kernel; null: the data's sequence length."""
        min_step: float = Field(default=0.001, gt=0)
        """Smallest initial discretisation step; the logarithms are uniform."""
        max_step: float = Field(default=0.1, gt=0)
        """Largest initial discretisation step."""
        bias: bool = True
        """Whether the linear map after the convolution has a bias."""

    seams: ClassVar[Seams] = {"convolve": Role.CONVOLUTION, "first_hidden": Role.FIRST_HIDDEN}
    uses_position: ClassVar[bool] = False
    shards_sequence: ClassVar[bool] = True

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        self.first_hidden = 0
        """Index in the model of the first local channel: set when channels are sharded over ranks."""
        length = config.length or dims.length
        self.ssm = StateSpace(dims.width, config.states, length, (config.min_step, config.max_step))
        self.o = Linear(
            dims.width, dims.width, ("width", "ffn"), dims.residual_init, bias=config.bias
        )

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
