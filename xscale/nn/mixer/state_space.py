"""The state space of S4 (Gu et al. 2022, whose equations are those of `s4.py`): its matrices, kernel and chunks."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from xscale.nn.attention.ops.dense import upcast
from xscale.nn.compiling.traceable_property import TraceableProperty
from xscale.nn.init import ONES, Init
from xscale.nn.module import Module

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
