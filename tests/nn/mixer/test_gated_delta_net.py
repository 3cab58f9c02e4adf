"""Gated delta networks against the recurrence of the paper, and against transformers with the same weights."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import WIDTH, close, dims, drawn, numbered, ready, tokens
from tests.nn.mixer.test_mamba2 import linear, silu
from xscale.nn.forward import Forward
from xscale.nn.materialize import materialize
from xscale.nn.mixer.gated_delta_net import GatedDeltaNet
from xscale.nn.module import name_modules
from xscale.nn.tokens import Tokens

LENGTH = 70
CONFIGS: list[dict[str, Any]] = [
    {"heads": 4},
    {"heads": 4, "key_heads": 2, "head_width": 5, "value_width": 3, "convolution": 2},
]


def network(**config: Any) -> GatedDeltaNet:
    part = GatedDeltaNet.Config(**config)
    assert GatedDeltaNet.check(part, dims(), "mixer") == []
    return ready(GatedDeltaNet(part, dims()))


def convolved(layer: Any, sequence: list[Tensor], t: int) -> Tensor:
    size = layer.weight.shape[1]
    terms = [layer.weight[:, j] * sequence[t - size + 1 + j] for j in range(size) if t - size + 1 + j >= 0]
    return silu(torch.stack(terms).sum(0))


def normal(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def literal(part: GatedDeltaNet, x: Tensor) -> Tensor:
    """Equation 10 with the state as the paper has it, [V, K]: S = S (a (I - b k k^T)) + b v k^T, for x [T, D]."""
    heads, keys, width = part.heads, part.key_heads, part.head_width
    qs, ks, vs = ([linear(layer, u) for u in x] for layer in (part.q, part.k, part.v))
    state = [x.new_zeros(part.value_width, width) for _ in range(heads)]
    out = []
    for t, u in enumerate(x):
        q = normal(convolved(part.q_convolution, qs, t).view(keys, width)) / width**0.5
        k = normal(convolved(part.k_convolution, ks, t).view(keys, width))
        v = convolved(part.v_convolution, vs, t).view(heads, -1)
        step = torch.log1p((linear(part.step, u) + part.decay.bias).exp())
        strength = 1 / (1 + (-linear(part.strength, u)).exp())
        outputs = []
        for h in range(heads):
            key = k[h // (heads // keys)]
            keep = (-part.decay.log_rate[h].exp() * step[h]).exp()
            eye = torch.eye(width, dtype=x.dtype)
            state[h] = state[h] @ (keep * (eye - strength[h] * torch.outer(key, key)))
            state[h] = state[h] + strength[h] * torch.outer(v[h], key)
            o = state[h] @ q[h // (heads // keys)]
            outputs.append(o / (o.square().mean() + 1e-5).sqrt() * part.norm.get_parameter("weight"))
        out.append(linear(part.o, torch.cat(outputs) * silu(linear(part.gate, u))))
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
        assert cache[part.path].shape == (2, 4, 6, 12)
        assert sum(kept.numel() for kept in cache.values()) == 2 * (4 * 6 * 12 + 3 * 4 * (6 + 6 + 12))


def test_it_starts_as_the_authors() -> None:
    """Rates of decay uniform to 16, steps from 0.001 to 0.1 with uniform logarithms."""
    part = GatedDeltaNet(GatedDeltaNet.Config(heads=512, head_width=1), dims())
    name_modules(part)
    materialize(part, 0)
    rates, steps = part.decay.log_rate.exp(), torch.nn.functional.softplus(part.decay.bias)
    assert 0.0099 < rates.min() < 0.2
    assert 15.8 < rates.max() <= 16.0001
    assert 0.00099 < steps.min() < 0.0012
    assert 0.09 < steps.max() < 0.1001


@pytest.mark.parametrize(
    ("config", "key", "says"),
    [
        ({"heads": 4, "key_heads": 3}, "key_heads", "Take 1, 2, 4 or null."),
        ({"min_step": 0.2}, "min_step", "max_step=0.1"),
    ],
)
def test_what_does_not_fit_is_refused(config: dict[str, Any], key: str, says: str) -> None:
    (problem,) = GatedDeltaNet.check(GatedDeltaNet.Config(**config), dims(), "mixer")
    assert problem.path == f"mixer.{key}"
    assert says in str(problem)


@pytest.mark.long
@pytest.mark.parametrize("key_heads", [2, 4])
def test_it_is_the_layer_of_transformers(key_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    modeling = pytest.importorskip(
        "transformers.models.qwen3_next.modeling_qwen3_next", reason="transformers is not installed"
    )
    # Where flash-linear-attention is installed transformers takes its kernels, which need a GPU.
    in_torch = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", in_torch)
    config = modeling.Qwen3NextConfig(
        hidden_size=WIDTH, linear_num_value_heads=4, linear_num_key_heads=key_heads, linear_key_head_dim=6,
        linear_value_head_dim=10, num_hidden_layers=1, rms_norm_eps=1e-5, layer_types=["linear_attention"],
    )  # fmt: skip
    part = network(heads=4, key_heads=key_heads, head_width=6, value_width=10).float()
    other = modeling.Qwen3NextGatedDeltaNet(config, 0).eval()

    def grouped(*layers: Any) -> Tensor:
        """Rows of all projections of a key head, one key head after the other."""
        return torch.cat([layer.weight.view(key_heads, -1, WIDTH) for layer in layers], 1).flatten(0, 1)

    convolutions = (part.q_convolution, part.k_convolution, part.v_convolution)
    with torch.no_grad():
        other.in_proj_qkvz.weight.copy_(grouped(part.q, part.k, part.v, part.gate))
        other.in_proj_ba.weight.copy_(grouped(part.strength, part.step))
        other.conv1d.weight.copy_(torch.cat([layer.weight for layer in convolutions])[:, None])
        other.dt_bias.copy_(part.decay.bias)
        other.A_log.copy_(part.decay.log_rate)
        other.norm.weight.copy_(part.norm.get_parameter("weight"))
        other.out_proj.weight.copy_(part.o.weight)
        x = drawn(2, LENGTH, WIDTH).float()
        assert torch.allclose(part(x, tokens(LENGTH)), other(x), atol=1e-4, rtol=1e-4)
