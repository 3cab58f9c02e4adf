"""RWKV-7 against the equations of the paper, token by token, and its rule against flash-linear-attention's."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import WIDTH, close, dims, drawn, numbered, ready, tokens
from xscale.nn.attention.ops.generalized_delta_rule import GeneralizedDeltaRule
from xscale.nn.attention.ops.recurrence import advance_state
from xscale.nn.forward import Forward
from xscale.nn.materialize import materialize
from xscale.nn.mixer.rwkv7 import Rwkv7
from xscale.nn.module import name_modules
from xscale.nn.tokens import Tokens

LENGTH = 70
SMALL = {"decay_latent_width": 3, "rate_latent_width": 4, "gate_latent_width": 5}
B, H, F, K = 2, 3, 5, 4


def network(heads: int = 4) -> Rwkv7:
    config = Rwkv7.Config(heads=heads, **SMALL)
    assert Rwkv7.check(config, dims(), "mixer") == []
    return ready(Rwkv7(config, dims()))


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def literal(part: Rwkv7, x: Tensor, first: list[Tensor] | None = None) -> Tensor:
    """Time mixing of one sequence [T, D]: the state as the paper has it, wkv [V, K], with row vectors.

    `first` are the tokens' values in the first layer, which appends its own to an empty list.
    """
    heads, width = part.heads, part.head_width
    decay, rate, gate = part.decay_map, part.rate_map, part.gate_map
    xi, alpha, rho = part.removal, part.replacement, part.bonus
    wkv = [x.new_zeros(width, width) for _ in range(heads)]
    out = []
    for t, u in enumerate(x):
        before = x[t - 1] if t else torch.zeros_like(u)
        shifted = {name: u + (before - u) * part.get_parameter(f"mix_{name}") for name in "rdkvag"}
        r, k, v = part.r.weight @ shifted["r"], part.k.weight @ shifted["k"], part.v.weight @ shifted["v"]
        if part.value_map is not None:
            assert first is not None
            of_value = part.value_map
            nu = sigmoid(of_value.up.weight @ (of_value.down.weight @ shifted["v"]) + of_value.get_parameter("bias"))
            v = v + (first[t] - v) * nu
        elif first is not None:
            first.append(v)
        d = decay.up.weight @ torch.tanh(decay.down.weight @ shifted["d"]) + decay.get_parameter("bias")
        w = (-math.exp(-0.5) * sigmoid(d)).exp()
        a = sigmoid(rate.up.weight @ (rate.down.weight @ shifted["a"]) + rate.get_parameter("bias"))
        g = gate.up.weight @ sigmoid(gate.down.weight @ shifted["g"])
        kappa, replaced = k * xi, k * (1 + (a - 1) * alpha)
        p = []
        for h in range(heads):
            of = slice(h * width, (h + 1) * width)
            removal = kappa[of] / kappa[of].norm()
            transition = torch.diag(w[of]) - torch.outer(removal, a[of] * removal)
            wkv[h] = wkv[h] @ transition + torch.outer(v[of], replaced[of])
            o = wkv[h] @ r[of]
            centred = o - o.mean()
            o = centred / (centred.square().mean() + 1e-5 * width).sqrt()
            o = o * part.norm_weight[of] + part.norm_bias[of]
            p.append(o + (r[of] * rho[of] * replaced[of]).sum() * v[of])
        out.append(part.o.weight @ (g * torch.cat(p)))
    return torch.stack(out)


@pytest.mark.parametrize("heads", [2, 8])
def test_it_is_the_papers_recurrence(heads: int) -> None:
    part, x = network(heads), drawn(2, LENGTH, WIDTH)
    assert close(part(x, tokens(LENGTH)), torch.stack([literal(part, row) for row in x]))


def test_gradients_are_those_of_the_recurrence() -> None:
    part, weights = network(), drawn(1, 20, WIDTH, seed=2)
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
    part, x = network(), drawn(2, LENGTH, WIDTH)
    packed = part(x, tokens(LENGTH, documents=numbered(9, 2, 59)))
    apart = [part(piece, tokens(piece.shape[1])) for piece in x.split([9, 2, 59], 1)]
    assert close(packed, torch.cat(apart, 1))


def test_generation_keeps_a_state_of_fixed_size() -> None:
    part, x = network(), drawn(2, 12, WIDTH)
    whole, cache, about = part(x, tokens(12)), dict[str, Any](), tokens(12)
    for start in range(12):
        step = Tokens(
            about.ids[:, start : start + 1], about.positions[:, start : start + 1], forward=Forward(cache=cache)
        )
        assert close(part(x[:, start : start + 1], step), whole[:, start : start + 1])
        assert sum(kept.numel() for kept in cache.values()) == 2 * (4 * 8 * 8 + WIDTH)


def test_it_starts_as_the_authors() -> None:
    """In the middle of the stack tokens are mixed by 1 - (i / D)^(exponent / 2), and decays fall over the channels."""
    part = Rwkv7(Rwkv7.Config(**SMALL), dims(depth=3, layer=1))
    name_modules(part)
    materialize(part, 0)
    for name, exponent in {"r": 0.2, "d": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}.items():
        mix = part.get_parameter(f"mix_{name}")
        for channel in range(WIDTH):
            expected = 1 - (channel / WIDTH) ** (exponent * 2 / 3)
            assert mix[channel].item() == pytest.approx(expected, abs=1e-6)
    speeds = [-7 + 5 * (n / (WIDTH - 1)) ** (0.85 + 0.5**0.5) + 0.5 for n in range(WIDTH)]
    assert part.decay_map.get_parameter("bias").tolist() == pytest.approx(speeds, abs=1e-5)
    for zero in (part.o.weight, part.decay_map.down.weight, part.bonus):
        assert not zero.any()
    assert part.norm_weight.unique().tolist() == pytest.approx([(2 / 3) ** 0.7])


def test_heads_that_do_not_fit_are_refused() -> None:
    (problem,) = Rwkv7.check(Rwkv7.Config(heads=5), dims(), "mixer")
    assert problem.path == "mixer.heads"
    assert "heads=5 does not divide width=32" in str(problem)


def inputs(length: int, scale: float = 1.0) -> list[Tensor]:
    """r, log decay, k, v, a and b, with a of length 1 and b in its direction, as the layer has them."""
    r, k, v = drawn(B, H, length, F), drawn(B, H, length, F, seed=1), drawn(B, H, length, K, seed=2)
    log_decay = -torch.nn.functional.softplus(drawn(B, H, length, F, seed=3)) * scale
    removal = torch.nn.functional.normalize(drawn(B, H, length, F, seed=4), dim=-1)
    return [r, log_decay, k, v, -removal, removal * sigmoid(drawn(B, H, length, F, seed=5))]


def rule(given: list[Tensor], documents: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """S = diag(exp(d)) S + b (a^T S) + k v^T, o = S^T r, token by token; empty where a document begins."""
    r, log_decay, k, v, a, b = given
    out = []
    for t in range(r.shape[2]):
        if documents is not None and t:
            state = state * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        read = (a[:, :, t, :, None] * state).sum(2, keepdim=True)
        state = log_decay[:, :, t].exp()[..., None] * state + b[:, :, t, :, None] * read
        state = state + k[:, :, t, :, None] * v[:, :, t, None, :]
        out.append((state * r[:, :, t, :, None]).sum(2))
    return torch.stack(out, 2), state


@pytest.mark.parametrize("length", [1, 2, 63, 64, 150])
def test_chunks_are_the_rule(length: int) -> None:
    given, state = inputs(length), drawn(B, H, F, K, seed=7)
    parts = [length] if length < 3 else [length // 3, length - length // 3 - 1, 1]
    for documents in (None, numbered(*parts)):
        recurrence = GeneralizedDeltaRule(*given, documents=documents)
        for computed, expected in zip(recurrence.outputs_and_state(state), rule(given, documents, state), strict=True):
            assert close(computed, expected)
        matrix, ended = recurrence.transition()
        assert close(advance_state(matrix, state) + ended, rule(given, documents, state)[1])


def test_strong_decays_stay_finite() -> None:
    """A decay by exp(-2000) in one token, in float32: no exponential overflows, forward or backward."""
    leaves = [x.float().requires_grad_() for x in inputs(130, scale=2000)]
    out, _ = GeneralizedDeltaRule(*leaves).outputs_and_state()
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    assert all(bool(x.isfinite().all()) for x in (out, *gradients))


@pytest.mark.long
def test_it_is_the_rule_of_flash_linear_attention() -> None:
    naive = pytest.importorskip(
        "fla.ops.generalized_delta_rule.dplr.naive", reason="flash-linear-attention is not installed"
    )
    r, log_decay, k, v, a, b = (x.float() for x in inputs(LENGTH))
    out, last = GeneralizedDeltaRule(r, log_decay, k, v, a, b).outputs_and_state()
    expected, expected_last = naive.dplr_recurrence(r * F**0.5, k, v, a, b, log_decay, output_final_state=True)
    assert torch.allclose(out, expected, atol=1e-4, rtol=1e-4)
    assert torch.allclose(last, expected_last, atol=1e-4, rtol=1e-4)
