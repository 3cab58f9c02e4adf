"""Requirements on norms beyond the suite of all operators: mixed precision, flat rows, faults that are named."""

import pytest
import torch

from xscale_kernels.layernorm import layernorm
from xscale_kernels.rmsnorm import rmsnorm


def test_gradcheck_strides_and_mixed_precision() -> None:
    x = torch.randn(4, 6, 10, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    turned = x.transpose(1, 2)
    from xscale_kernels.rmsnorm import cpu

    assert torch.autograd.gradcheck(lambda a, w: cpu.rmsnorm(a.transpose(1, 2), w, 1e-6), (x, weight))
    torch.testing.assert_close(rmsnorm(turned, weight), rmsnorm(turned.contiguous(), weight))
    assert rmsnorm(turned.bfloat16(), weight.float()).dtype == torch.bfloat16


def test_faults_are_named() -> None:
    with pytest.raises(ValueError, match="weight of the last axis's size 3"):
        rmsnorm(torch.zeros(2, 3), torch.zeros(4))
    with pytest.raises(ValueError, match="apex needs a GPU"):
        rmsnorm(torch.zeros(2, 3), None, implementation="apex")


@pytest.mark.parametrize("parameters", [0, 1, 2])
def test_rows_that_vary_little_have_accurate_gradients_in_half_precision(parameters: int) -> None:
    """A row's statistics in half precision would put gradients off by some percent."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(2, 500, 4, generator=generator).bfloat16()
    x, seed = (numbers[0] * 0.1 + 1).requires_grad_(), numbers[1]
    given = [torch.linspace(0.5, 1.5, 4).bfloat16()] * parameters + [None] * (2 - parameters)
    (gradient,) = torch.autograd.grad(layernorm(x, *given, implementation="torch"), x, seed)
    exact = x.detach().double().requires_grad_()
    rows = exact - exact.mean(-1, keepdim=True)
    y = rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    y = y if given[0] is None else y * given[0].double()
    (wanted,) = torch.autograd.grad(y, exact, seed.double())
    errors = (gradient.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert errors.max() < 0.015
