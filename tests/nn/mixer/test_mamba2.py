"""Mamba-2 against the recurrence of its paper, token by token, and against transformers with the same weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import WIDTH, close, dims, drawn, numbered, ready, tokens
from xscale.nn.forward import Forward
from xscale.nn.materialize import materialize
from xscale.nn.mixer.mamba2 import Mamba2
from xscale.nn.module import name_modules
from xscale.nn.tokens import Tokens

LENGTH = 70
CONFIGS: list[dict[str, Any]] = [
    {"heads": 4, "states": 6},
    {"heads": 4, "states": 6, "groups": 2, "head_width": 5, "convolution": 3, "bias": True},
]


def network(**config: Any) -> Mamba2:
    part = Mamba2.Config(**config)
    assert Mamba2.check(part, dims(), "mixer") == []
    return ready(Mamba2(part, dims()))


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def linear(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = layer.weight @ x
    return y if layer.bias is None else y + layer.bias


def convolved(layer: Any, sequence: list[Tensor], t: int) -> Tensor:
    """silu(b + sum_j w_j x_(t - k + 1 + j)), with zeros before the first token."""
    size = layer.weight.shape[1]
    y = layer.bias if layer.bias is not None else torch.zeros_like(sequence[0])
    for j in range(size):
        if t - size + 1 + j >= 0:
            y = y + layer.weight[:, j] * sequence[t - size + 1 + j]
    return silu(y)


def literal(part: Mamba2, x: Tensor) -> Tensor:
    """h_t = exp(-a dt) h_(t-1) + dt B x^T, y = C h + D x, out = W norm(y silu(z)), for one sequence [T, D]."""
    heads, width, states, groups = part.heads, part.head_width, part.states, part.groups
    xs, bs, cs = ([linear(layer, u) for u in x] for layer in (part.x, part.b, part.c))
    state = [x.new_zeros(states, width) for _ in range(heads)]
    out = []
    for t, u in enumerate(x):
        v = convolved(part.x_convolution, xs, t).view(heads, width)
        b = convolved(part.b_convolution, bs, t).view(groups, states)
        c = convolved(part.c_convolution, cs, t).view(groups, states)
        dt = torch.log1p((linear(part.step, u) + part.decay.bias).exp())
        y = []
        for h in range(heads):
            group = h // (heads // groups)
            keep = (-part.decay.log_rate[h].exp() * dt[h]).exp()
            state[h] = keep * state[h] + dt[h] * torch.outer(b[group], v[h])
            y.append(c[group] @ state[h] + part.skip[h] * v[h])
        gated = (torch.cat(y) * silu(linear(part.gate, u))).view(groups, -1)
        normed = gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        out.append(linear(part.o, normed.flatten() * part.norm.weight))
    return torch.stack(out)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_it_is_the_papers_recurrence(config: dict[str, Any]) -> None:
    part, x = network(**config), drawn(2, LENGTH, WIDTH)
    assert close(part(x, tokens(LENGTH)), torch.stack([literal(part, row) for row in x]))


def test_gradients_are_those_of_the_recurrence() -> None:
    part, weights = network(**CONFIGS[1]), drawn(1, 20, WIDTH, seed=2)
    gradients = []
    for run in (
        lambda x: part(x, Tokens.from_ids(torch.zeros(1, 20, dtype=torch.long))),
        lambda x: literal(part, x[0]),
    ):
        x = drawn(1, 20, WIDTH).requires_grad_()
        loss = (run(x) * weights).sum()
        gradients.append(torch.autograd.grad(loss, [x, *part.parameters()]))
    for computed, expected in zip(*gradients, strict=True):
        assert close(computed, expected)


def test_packed_documents_are_documents_apart() -> None:
    part, x = network(**CONFIGS[1]), drawn(2, LENGTH, WIDTH)
    packed = part(x, tokens(LENGTH, documents=numbered(9, 2, 59)))
    apart = [part(piece, tokens(piece.shape[1])) for piece in x.split([9, 2, 59], 1)]
    assert close(packed, torch.cat(apart, 1))


def test_generation_keeps_a_state_of_fixed_size() -> None:
    part, x = network(**CONFIGS[0]), drawn(2, 12, WIDTH)
    whole, cache, about = part(x, tokens(12)), dict[str, Any](), tokens(12)
    for start in range(12):
        step = Tokens(
            about.ids[:, start : start + 1], about.positions[:, start : start + 1], forward=Forward(cache=cache)
        )
        assert close(part(x[:, start : start + 1], step), whole[:, start : start + 1])
        assert cache[part.path].shape == (2, 4, 6, 16)
        assert sum(kept.numel() for kept in cache.values()) == 2 * (4 * 6 * 16 + 3 * (64 + 6 + 6))


def test_it_starts_as_the_paper() -> None:
    """Rates of decay uniform from 1 to 16, steps from 0.001 to 0.1 with uniform logarithms, D = 1."""
    part = Mamba2(Mamba2.Config(heads=512, head_width=1), dims())
    name_modules(part)
    materialize(part, 0)
    rates = part.decay.log_rate.exp()
    assert 1 <= rates.min() < 1.2
    assert 15.8 < rates.max() <= 16.0001
    assert rates.mean().item() == pytest.approx(8.5, abs=0.6)
    steps = torch.nn.functional.softplus(part.decay.bias)
    assert 0.00099 < steps.min() < 0.0012
    assert 0.09 < steps.max() < 0.1001
    assert steps.log10().mean().item() == pytest.approx(-2, abs=0.1)
    assert torch.equal(part.skip, torch.ones(512))


@pytest.mark.parametrize(
    ("config", "key", "says"),
    [
        ({"heads": 3}, "heads", "does not divide 2 * width=64"),
        ({"heads": 4, "groups": 3}, "groups", "Take 1, 2 or 4."),
        ({"min_step": 0.2}, "min_step", "max_step=0.1"),
        ({"min_rate": 17}, "min_rate", "max_rate=16"),
    ],
)
def test_what_does_not_fit_is_refused(config: dict[str, Any], key: str, says: str) -> None:
    (problem,) = Mamba2.check(Mamba2.Config(**config), dims(), "mixer")
    assert problem.path == f"mixer.{key}"
    assert says in str(problem)


@pytest.mark.long
@pytest.mark.parametrize("groups", [1, 2])
def test_it_is_the_layer_of_transformers(groups: int) -> None:
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2", reason="transformers is not installed")
    sizes = {"num_heads": 4, "head_dim": 16, "hidden_size": WIDTH, "state_size": 6, "n_groups": groups}
    config = modeling.Mamba2Config(**sizes, num_hidden_layers=1, chunk_size=32, vocab_size=8)
    part = network(heads=4, states=6, groups=groups).float()
    other = modeling.Mamba2Mixer(config, 0).eval()
    parts = (part.gate, part.x, part.b, part.c, part.step)
    convolutions = (part.x_convolution, part.b_convolution, part.c_convolution)
    with torch.no_grad():
        other.in_proj.weight.copy_(torch.cat([linear.weight for linear in parts]))
        other.conv1d.weight.copy_(torch.cat([layer.weight for layer in convolutions])[:, None])
        other.conv1d.bias.copy_(torch.cat([layer.bias for layer in convolutions if layer.bias is not None]))
        other.dt_bias.copy_(part.decay.bias)
        other.A_log.copy_(part.decay.log_rate)
        other.D.copy_(part.skip)
        other.norm.weight.copy_(part.norm.weight)
        other.out_proj.weight.copy_(part.o.weight)
        x = drawn(2, LENGTH, WIDTH).float()
        assert torch.allclose(part(x, tokens(LENGTH)), other(x), atol=1e-4, rtol=1e-4)
