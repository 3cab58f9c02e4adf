"""Feed-forward parts against their papers' formulas."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.conformance.made import dims, drawn, ready, tokens
from xscale.nn.ffn.ffn import Dense, Gated, activation

FUNCTIONS: dict[str, Any] = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "swish": lambda x: x / (1 + torch.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "identity": lambda x: x,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activations_are_their_formulas(name: Any) -> None:
    x = drawn(50)
    assert torch.allclose(activation(name)(x), FUNCTIONS[name](x))


@pytest.mark.parametrize("name", ["relu", "gelu", "swish"])
@pytest.mark.parametrize("bias", [False, True])
def test_dense_is_its_formula(name: Any, bias: bool) -> None:
    part = ready(Dense(Dense.Config(hidden=24, activation=name, bias=bias), dims(width=8)))
    x = drawn(2, 5, 8)
    inner = FUNCTIONS[name](F.linear(x, part.up.weight, part.up.bias))
    assert torch.allclose(part(x, tokens(5)), F.linear(inner, part.down.weight, part.down.bias))
    assert (part.up.bias is not None) == bias


@pytest.mark.parametrize(
    ("gate", "function"),
    [("glu", "sigmoid"), ("bilinear", "identity"), ("reglu", "relu"), ("geglu", "gelu"), ("swiglu", "swish")],
)
def test_gated_is_its_formula(gate: Any, function: str) -> None:
    part = ready(Gated(Gated.Config(hidden=24, gate=gate), dims(width=8)))
    x = drawn(2, 5, 8)
    inner = FUNCTIONS[function](x @ part.gate.weight.t()) * (x @ part.up.weight.t())
    assert torch.allclose(part(x, tokens(5)), inner @ part.down.weight.t())


def test_a_clamped_gated_layer_is_its_formula() -> None:
    """gpt-oss: the gate is cut from above alone, what is gated on both sides, and 1 is added to it."""
    config = Gated.Config(hidden=24, gate="quick_geglu", bias=True, clamp_value=0.7, linear_offset=1.0)
    part = ready(Gated(config, dims(width=8)))
    x = 3 * drawn(2, 5, 8)
    expected = torch.zeros(2, 5, 24, dtype=x.dtype)
    cut = set()
    for b, t, unit in ((b, t, unit) for b in range(2) for t in range(5) for unit in range(24)):
        gate = sum(x[b, t, i] * part.gate.weight[unit, i] for i in range(8)) + part.gate.bias[unit]
        up = sum(x[b, t, i] * part.up.weight[unit, i] for i in range(8)) + part.up.bias[unit]
        cut |= {("gate", -1 if gate < -0.7 else int(gate > 0.7)), ("up", -1 if up < -0.7 else int(up > 0.7))}
        gate, up = min(gate, torch.tensor(0.7)), max(min(up, torch.tensor(0.7)), torch.tensor(-0.7))
        expected[b, t, unit] = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    assert len(cut) == 6, "both parts lie below, within and above the bounds"
    assert torch.allclose(part(x, tokens(5)), F.linear(expected, part.down.weight, part.down.bias))


def test_hidden_widths_by_default() -> None:
    assert Dense(Dense.Config(), dims(width=96)).up.weight.shape == (384, 96)
    # 8/3 of 96 is 256: three matrices of it weigh what two of four times the width do.
    assert Gated(Gated.Config(), dims(width=96)).up.weight.shape == (256, 96)
    assert Gated(Gated.Config(), dims(width=100)).up.weight.shape == (320, 100)


def test_what_writes_into_the_residual_stream_starts_smaller() -> None:
    for part in (Dense(Dense.Config(), dims(depth=8)), Gated(Gated.Config(), dims(depth=8))):
        assert part.up.init["weight"].std == 0.02
        assert part.down.init["weight"].std == pytest.approx(0.02 / 4)
