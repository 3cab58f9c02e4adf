"""Gated linear attention against the recurrence of the paper, token by token, and flash-linear-attention's."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import WIDTH, close, dims, drawn, numbered, ready, tokens
from tests.nn.mixer.test_mamba2 import linear, silu
from xscale.nn.attention.ops.decayed_sums import ChannelDecayedSums
from xscale.nn.forward import Forward
from xscale.nn.mixer.gated_linear_attention import GatedLinearAttention
from xscale.nn.tokens import Tokens

LENGTH = 70
CONFIGS: list[dict[str, Any]] = [
    {"heads": 4},
    {"heads": 2, "head_width": 5, "value_width": 3, "gate_latent_width": 4, "temperature": 2.0},
]


def network(**config: Any) -> GatedLinearAttention:
    part = GatedLinearAttention.Config(**config)
    assert GatedLinearAttention.check(part, dims(), "mixer") == []
    return ready(GatedLinearAttention(part, dims()))


def literal(part: GatedLinearAttention, x: Tensor) -> Tensor:
    """S = diag(a) S + k v^T, o = S^T q, out = W (swish(r) LN(o)), a = sigmoid(...)^(1 / tau), for x [T, D]."""
    heads = part.heads
    norm = dict(part.norm.named_parameters())
    state = [x.new_zeros(part.head_width, part.value_width) for _ in range(heads)]
    out = []
    for u in x:
        q, k, v = (linear(layer, u).view(heads, -1) for layer in (part.q, part.k, part.v))
        keep = (1 / (1 + (-linear(part.decay_up, linear(part.decay_down, u))).exp())) ** (1 / part.temperature)
        outputs = []
        for h in range(heads):
            state[h] = torch.diag(keep.view(heads, -1)[h]) @ state[h] + torch.outer(k[h], v[h])
            o = q[h] @ state[h]
            centred = o - o.mean()
            outputs.append(centred / (centred.square().mean() + 1e-5).sqrt() * norm["weight"] + norm["bias"])
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
        assert {name: kept.shape for name, kept in cache.items()} == {part.path: (2, 4, 4, 8)}


@pytest.mark.parametrize(
    ("config", "says"),
    [({"heads": 3}, "heads=3 does not divide width=32"), ({"heads": 32}, "2 * heads=64 does not divide width=32")],
)
def test_heads_that_do_not_fit_are_refused(config: dict[str, Any], says: str) -> None:
    problems = GatedLinearAttention.check(GatedLinearAttention.Config(**config), dims(), "mixer")
    assert any(problem.path == "mixer.heads" and says in str(problem) for problem in problems)


@pytest.mark.long
def test_it_is_the_recurrence_of_flash_linear_attention() -> None:
    naive = pytest.importorskip("fla.ops.gla.naive", reason="flash-linear-attention is not installed")
    q, k, v = (drawn(2, 3, LENGTH, width, seed=at).float() for at, width in enumerate((8, 8, 5)))
    log_decay = torch.nn.functional.logsigmoid(drawn(2, 3, LENGTH, 8, seed=3)).float()
    state = drawn(2, 3, 8, 5, seed=4).float()
    out, last = ChannelDecayedSums(q, k, v, log_decay).outputs_and_state(state)
    by_token = (x.transpose(1, 2) for x in (q * 8**0.5, k, v, log_decay))
    expected, expected_last = naive.naive_recurrent_gla(*by_token, initial_state=state, output_final_state=True)
    assert torch.allclose(out, expected.transpose(1, 2), atol=1e-4, rtol=1e-4)
    assert torch.allclose(last, expected_last, atol=1e-4, rtol=1e-4)
