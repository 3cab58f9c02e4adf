"""S4 against the recurrence with the dense, discretised A, and its start against HiPPO-LegS as the paper writes it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import WIDTH, close, dims, drawn, ready, tokens
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.nn.forward import Forward
from xscale.nn.materialize import materialize
from xscale.nn.mixer.s4 import S4, convolve
from xscale.nn.mixer.state_space import Chunk, diagonal_plus_correction
from xscale.nn.module import name_modules
from xscale.nn.tokens import Tokens

LENGTH = 37


def network(length: int = LENGTH, states: int = 8, **config: Any) -> S4:
    given = S4.Config(states=states, **config)
    about = dims(length=length)
    assert S4.check(given, about, "mixer") == []
    part = S4(given, about)
    name_modules(part)
    materialize(part, 0, dtype=torch.float64)
    with torch.no_grad():
        for at, parameter in enumerate(part.parameters()):
            parameter.add_(drawn(*parameter.shape, seed=1000 + at), alpha=0.05)
    return part.eval()


def hippo(states: int) -> tuple[Tensor, Tensor]:
    """Equation 2 entry by entry, n and k from 0, and B."""
    a = torch.zeros(states, states, dtype=torch.float64)
    for n in range(states):
        for k in range(states):
            if n > k:
                a[n, k] = -math.sqrt(2 * n + 1) * math.sqrt(2 * k + 1)
            elif n == k:
                a[n, k] = -(n + 1)
    return a, torch.tensor([math.sqrt(2 * n + 1) for n in range(states)], dtype=torch.float64)


@pytest.mark.parametrize("states", [2, 8, 64])
def test_it_starts_as_hippo(states: int) -> None:
    """The same numbers in another basis: A's eigenvalues by trace of powers, and P^T A^k B for k = 0, 1, 2."""
    a, b = hippo(states)
    p = torch.tensor([math.sqrt(n + 0.5) for n in range(states)], dtype=torch.float64)
    halves = [torch.from_numpy(x).to(torch.complex128) for x in diagonal_plus_correction(states)]
    assert all(half.shape == (states // 2,) for half in halves)
    full, low, into = (torch.cat((x, x.conj())) for x in halves)
    other = torch.diag(full) - low[:, None] * low.conj()
    power, other_power = torch.eye(states, dtype=torch.float64), torch.eye(states, dtype=torch.complex128)
    for _ in range(3):
        assert torch.allclose((p @ power @ b).to(other.dtype), low.conj() @ other_power @ into, rtol=1e-9)
        assert torch.allclose(power.trace().to(other.dtype), other_power.trace(), rtol=1e-9)
        power, other_power = power @ a, other_power @ other


def literal(part: S4, u: Tensor) -> Tensor:
    """Channel by channel, token by token: x_k = Abar x_(k-1) + Bbar u_k, y_k = C x_k + D u_k, with dense matrices."""
    ssm, out = part.ssm, torch.zeros_like(u)
    for channel in range(u.shape[2]):
        half = -ssm.log_decay[channel].exp() + 1j * ssm.frequency[channel]
        p = ssm.correction_real[channel] + 1j * ssm.correction_imaginary[channel]
        b = ssm.b_real[channel] + 1j * ssm.b_imaginary[channel]
        c = ssm.c_real[channel] + 1j * ssm.c_imaginary[channel]
        eigenvalues, p, b, c = (torch.cat((x, x.conj())) for x in (half, p, b, c))
        a = torch.diag(eigenvalues) - torch.outer(p, p.conj())
        eye, step = torch.eye(len(a), dtype=a.dtype), ssm.log_step[channel].exp()
        inverse = torch.linalg.inv(eye - step / 2 * a)
        abar, bbar = inverse @ (eye + step / 2 * a), inverse @ b * step
        power = eye
        for _ in range(ssm.length):
            power = power @ abar
        c = c @ torch.linalg.inv(eye - power)
        for sample in range(len(u)):
            x = torch.zeros(len(a), dtype=a.dtype)
            for k in range(u.shape[1]):
                x = abar @ x + bbar * u[sample, k, channel]
                y = c @ x
                assert abs(y.imag) < 1e-9
                out[sample, k, channel] = y.real + ssm.skip[channel] * u[sample, k, channel]
    return out


@pytest.mark.parametrize(("length", "used"), [(37, 37), (36, 36), (36, 20), (1, 1)])
def test_convolution_and_recurrence_are_the_dense_recurrence(length: int, used: int) -> None:
    part, u = network(length), drawn(1, used, WIDTH)
    with torch.no_grad():
        y = literal(part, u)
        expected = part.o(torch.nn.functional.gelu(y))
        assert (part(u, tokens(used, batch=1)) - expected).abs().max() < 1e-9
        cache: dict[str, Any] = {}
        about, outputs = tokens(used, batch=1), []
        for start in range(used):
            here = Tokens(
                about.ids[:, start : start + 1], about.positions[:, start : start + 1], forward=Forward(cache=cache)
            )
            outputs.append(part(u[:, start : start + 1], here))
        assert (torch.cat(outputs, 1) - expected).abs().max() < 1e-9


def by_chunks(part: S4, u: Tensor, size: int) -> Tensor:
    """Outputs for u [B, T, D] of chunks of so many tokens, each with the state before it; the last one is padded."""
    chunk, state, outputs = Chunk(part.ssm, size), u.new_zeros(len(u), u.shape[2], part.ssm.b_real.shape[1] * 2), []
    for shard in torch.nn.functional.pad(u, (0, 0, 0, -u.shape[1] % size)).split(size, 1):
        outputs.append(convolve(shard, chunk.kernel()) + chunk.response(state))
        state = chunk.advance_state(state) + chunk.end_state(shard)
    return torch.cat(outputs, 1)[:, : u.shape[1]] + part.ssm.skip * u


@pytest.mark.parametrize("states", [2, 8])
def test_chunks_with_the_states_between_them_are_the_dense_recurrence(states: int) -> None:
    """Chunks of one block and of many, which the block's size divides and does not."""
    part, u = network(36, states), drawn(1, 36, WIDTH)
    with torch.no_grad():
        expected = literal(part, u)
        for size in (1, 2, 7, 13, 36):
            assert (by_chunks(part, u, size) - expected).abs().max() < 1e-9, size


def test_generation_keeps_a_state_and_goes_on_beyond_the_kernel() -> None:
    """The recurrence needs no more room for more tokens; the convolution refuses them."""
    part, u = network(16), drawn(1, 40, WIDTH)
    longer = network(40)
    cache: dict[str, Any] = {}
    with torch.no_grad():
        whole = part(
            u, Tokens(torch.zeros(1, 40, dtype=torch.long), torch.arange(40)[None], forward=Forward(cache=cache))
        )
        c, state = cache[part.path]
        assert (c.shape, state.shape) == ((WIDTH, 4), (1, WIDTH, 4))
        # The same C in a kernel of another length is another C~ = C (I - Abar^40).
        for name, parameter in longer.named_parameters():
            parameter.copy_(part.get_parameter(name))
        ratio = longer.ssm.output_matrix()
        assert not close(ratio.real, c.real)
        assert close(whole[:, :16], part(u[:, :16], tokens(16, batch=1)))
    with pytest.raises(ConfigError, match="a kernel of 16 tokens, and the sequence has 40"):
        part(u, tokens(40, batch=1))


def test_single_precision_agrees_at_the_papers_size() -> None:
    """64 states at the start of training: kernel and recurrence in float32, against float64."""
    about = dims(length=1024)
    part = S4(S4.Config(), about)
    name_modules(part)
    materialize(part, 0)
    with torch.no_grad():
        single = part.ssm.kernel()
        signal = drawn(1, 1024, WIDTH)
        chunks = by_chunks(part, signal.float(), 300)
        double = part.double().ssm.kernel()
        whole = convolve(signal, double) + part.ssm.skip * signal
        assert (chunks - whole).abs().max() < 1e-4 * whole.abs().max()
        assert (single - double).abs().max() < 1e-4 * double.abs().max()
        impulse = torch.zeros(1, 64, WIDTH, dtype=torch.float64)
        impulse[:, 0] = 1
        response = part.recur(impulse, {})[0].T
        assert (response - double[:, :64]).abs().max() < 1e-5 * double.abs().max()


def test_steps_start_between_their_bounds() -> None:
    part = S4(S4.Config(min_step=0.01, max_step=0.02), dims())
    name_modules(part)
    materialize(part, 0)
    steps = part.ssm.log_step.exp()
    assert ((steps >= 0.0099) & (steps <= 0.0201)).all()
    assert steps.max() > 0.015 > steps.min()


def test_what_cannot_be_is_refused() -> None:
    (problem,) = S4.check(S4.Config(length=5), dims(length=9), "mixer")
    assert problem.path == "mixer.length"
    (problem,) = S4.check(S4.Config(min_step=1.0, max_step=0.1), dims(), "mixer")
    assert problem.path == "mixer.min_step"
    with pytest.raises(ConfigError, match="multiple of 2"):
        decode(S4.Config, {"states": 3})


def test_complex_parameters_are_pairs_of_real_ones(tmp_path: Path) -> None:
    part = ready(S4(S4.Config(states=4), dims()))
    assert all(not parameter.is_complex() for parameter in part.parameters())
    assert part.ssm.keeps_precision
    assert part.bfloat16()(drawn(1, 9, WIDTH).bfloat16(), tokens(9, batch=1)).dtype == torch.bfloat16
