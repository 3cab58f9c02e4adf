"""Norms against their papers' formulas."""

from typing import Any

import pytest
import torch

from tests.conformance.made import drawn, ready
from xscale.nn.materialize import materialize
from xscale.nn.norm.norm import Ada, Layer, Rms, Scale


def test_layer_norm_is_its_formula() -> None:
    norm, x = ready(Layer(Layer.Config(eps=0.1), 8)), drawn(2, 3, 8)
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
    assert norm.bias is not None
    wanted = (x - mean) / (variance + 0.1).sqrt() * norm.weight + norm.bias
    assert torch.allclose(norm(x), wanted)


def test_rms_norm_is_its_formula() -> None:
    norm, x = ready(Rms(Rms.Config(eps=0.1), 8)), drawn(2, 3, 8)
    wanted = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight
    assert torch.allclose(norm(x), wanted)


def test_ada_norm_is_its_formula_and_its_factor_has_no_gradient() -> None:
    norm, x = ready(Ada(Ada.Config(eps=0.1, scale=1.5, slope=0.3), 8)), drawn(2, 3, 8).requires_grad_()
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
    y = (x - mean) / (variance + 0.1).sqrt()
    factor = torch.tensor([[1.5 * (1 - 0.3 * value) for value in row] for row in y.detach().flatten(0, 1).tolist()])
    wanted = factor.to(y.dtype).view_as(y) * y
    assert torch.allclose(norm(x), wanted)
    weights = drawn(2, 3, 8, seed=1)
    (measured,) = torch.autograd.grad((norm(x) * weights).sum(), x)
    (expected,) = torch.autograd.grad((wanted * weights).sum(), x)
    assert torch.allclose(measured, expected)


def test_scale_norm_is_its_formula() -> None:
    norm, x = ready(Scale(Scale.Config(), 8)), drawn(2, 3, 8)
    rows = [
        [norm.weight.item() * value / sum(v * v for v in row) ** 0.5 for value in row]
        for row in x.flatten(0, 1).tolist()
    ]
    assert torch.allclose(norm(x), torch.tensor(rows, dtype=x.dtype).view_as(x))
    assert torch.equal(norm(0 * x), torch.zeros_like(x))


def test_scale_norm_starts_at_the_square_root_of_the_width() -> None:
    norm = Scale(Scale.Config(), 16)
    materialize(norm, seed=0)
    assert norm.weight.tolist() == [4.0]


def test_a_norm_without_bias_has_none() -> None:
    assert [name for name, _ in Layer(Layer.Config(bias=False), 8).named_parameters()] == ["weight"]
    assert [name for name, _ in Rms(Rms.Config(), 8).named_parameters()] == ["weight"]


@pytest.mark.parametrize("part", [Layer, Rms, Ada, Scale])
def test_half_precision_stays_half_and_accurate(part: Any) -> None:
    norm = ready(part(part.Config(), 256))
    x = 100 * drawn(4, 256)
    exact = norm(x)
    found = norm.to(torch.bfloat16)(x.bfloat16())
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), exact, rtol=0.05, atol=0.05)
