"""torchao's float8 training and MXFP8 against our definitions: torchao emulates its kernels on a CPU."""

from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.parallel.against_one import trained
from tests.parallel.models import DENSE, changed
from tests.parallel.test_float8 import E4M3, HALF, apart, drawn, nearest
from xscale.parallel.config import Float8Scaling
from xscale.parallel.precision import float8
from xscale.parallel.precision.float8_matmul import float8_product
from xscale.parallel.precision.float8_torchao import torchao_product

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
emulated = partial(torchao_product, emulated=True)
N, K, M = 40, 64, 96


def with_gradients(product: Any, *leaves: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The product of x [N, K] and the weight [M, K], and the gradients of both."""
    leaves = tuple(leaf.detach().to(dtype).requires_grad_() for leaf in leaves)
    y = product(*leaves)
    seed = (drawn(N, M, seed=2) * 1e-3).to(dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, seed)]


def uneven() -> tuple[Tensor, Tensor]:
    """x and a weight whose rows and blocks have largest numbers of many magnitudes."""
    x, weight = drawn(N, K), drawn(M, K, seed=1)
    return x * torch.logspace(-3, 2, K).roll(7), weight * torch.logspace(-4, 0, M).unsqueeze(1)


@pytest.mark.parametrize("scaling", ["tensor", "mx"])
def test_products_and_gradients_are_those_of_the_definition(scaling: Float8Scaling) -> None:
    ours = with_gradients(lambda x, weight: float8_product(x, weight, scaling, emulated=True), *uneven())
    theirs = with_gradients(lambda x, weight: emulated(x, weight, scaling), *uneven())
    # Scales are divided by in one and multiplied with in the other, so a number in between may round otherwise. That
    # is far below the error of float8 itself.
    for one, other in zip(ours, theirs, strict=True):
        assert apart(other, one) < (1e-3 if scaling == "tensor" else 1e-6)
    wide = with_gradients(F.linear, *uneven())
    assert apart(theirs[0], wide[0]) > 1e-2, "this was float8"


def by_power_of_two_rows(x: Tensor) -> Tensor:
    """Numbers that torchao's rowwise float8 of x [N, K] stands for: factors are rounded down to powers of two."""
    rows = []
    for row in x.double().tolist():
        largest, factor = max(abs(value) for value in row), 2.0**-60
        while 2 * factor * largest <= E4M3[-1]:
            factor *= 2
        rows.append([nearest(value * factor, E4M3) / factor for value in row])
    return torch.tensor(rows, dtype=torch.float64)


def test_rowwise_scales_are_powers_of_two() -> None:
    x, weight = uneven()
    seed = drawn(N, M, seed=2) * 1e-3
    wanted = [
        by_power_of_two_rows(x) @ by_power_of_two_rows(weight).t(),
        by_power_of_two_rows(seed) @ by_power_of_two_rows(weight.t()).t(),
        by_power_of_two_rows(seed.t()) @ by_power_of_two_rows(x.t()).t(),
    ]
    for found, exact in zip(
        with_gradients(lambda x, weight: emulated(x, weight, "row"), x, weight), wanted, strict=True
    ):
        assert apart(found, exact) < 1e-5
    ours = with_gradients(lambda x, weight: float8_product(x, weight, "row", emulated=True), x, weight)
    assert 1e-3 < apart(ours[0], wanted[0]) < 0.08, "our scales are not powers of two"


@pytest.mark.parametrize("scaling", ["tensor", "row", "mx"])
@pytest.mark.parametrize("rows", [1, 31, 33])
def test_any_number_of_rows_and_strided_ones(scaling: Float8Scaling, rows: int) -> None:
    """Rows are padded for the gradient of the weight, and what was added has no part in it."""
    wide = drawn(K, rows).t()
    x, weight = wide.to(torch.bfloat16).requires_grad_(), drawn(M, K, seed=1).to(torch.bfloat16).requires_grad_()
    y = emulated(x, weight, scaling)
    assert y.shape == (rows, M)
    assert y.dtype == torch.bfloat16
    to_x, to_weight = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    exact = (torch.ones(rows, M) @ weight.float(), torch.ones(M, rows) @ x.float())
    assert apart(to_x.float(), exact[0]) < 0.1
    assert apart(to_weight.float(), exact[1]) < 0.1


@pytest.mark.parametrize("scaling", ["tensor", "row", "mx"])
def test_a_model_learns_as_with_our_float8(scaling: str) -> None:
    model, numbers = changed(DENSE, stack__depth=1), []
    with patch.dict(float8.KERNELS, {"torchao": emulated}):
        for kernel in ("emulated", "torchao"):
            precision = {**HALF, "float8": scaling, "float8_kernel": kernel}
            numbers.append(trained(model, {}, precision=precision, steps=2).numbers)
    assert numbers[0] != trained(model, {}, precision=HALF, steps=2).numbers
    for ours, theirs in zip(*numbers, strict=True):
        assert theirs == pytest.approx(ours, rel=0.02)
