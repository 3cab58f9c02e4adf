"""Entmax against closed forms and an optimality condition, and its gradients, alpha's too."""

import pytest
import torch
from torch import Tensor

from tests.nn.attention.literal import build, drawn, inputs, masks, seen
from xscale.nn.attention.entmax import Entmax, entmax
from xscale.nn.dims import Dims
from xscale.nn.init import draw


def test_alpha_two_is_the_sparsemax() -> None:
    z = 2 * drawn(20, 9)
    ordered = z.sort(-1, descending=True).values
    sums = ordered.cumsum(-1)
    size = torch.arange(1, 10)
    support = (1 + size * ordered > sums).sum(-1, keepdim=True)
    tau = (sums.gather(-1, support - 1) - 1) / support
    torch.testing.assert_close(entmax(z, torch.tensor(2.0, dtype=z.dtype)), (z - tau).clamp(min=0))


def test_near_one_it_is_the_softmax() -> None:
    z = drawn(20, 9)
    torch.testing.assert_close(entmax(z, torch.tensor(1.0001, dtype=z.dtype)), z.softmax(-1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [1.05, 1.5, 1.9])
def test_it_sums_to_one_and_solves_its_equation(alpha: float, dtype: torch.dtype) -> None:
    z = (3 * drawn(50, 40)).to(dtype)
    p = entmax(z, torch.tensor(alpha, dtype=dtype))
    torch.testing.assert_close(p.sum(-1), torch.ones(50, dtype=dtype))
    # Where p > 0, (alpha - 1) z - p^(alpha - 1) is the same tau; elsewhere (alpha - 1) z is not above it.
    tau = (alpha - 1) * z - p.clamp(min=1e-30).pow(alpha - 1)
    inside = p > 1e-4
    highest, lowest = tau.masked_fill(~inside, -1e9).amax(-1), tau.masked_fill(~inside, 1e9).amin(-1)
    assert (highest - lowest).max() < 1e-3
    assert (((alpha - 1) * z).masked_fill(p > 0, -1e9).amax(-1) <= highest + 1e-4).all()
    if alpha > 1.4:
        assert (p == 0).any()


def test_gradients_fit_differences() -> None:
    z, alpha = drawn(4, 6, seed=3).requires_grad_(), torch.tensor([[1.2], [1.5], [1.7], [1.9]], dtype=torch.float64)
    assert torch.autograd.gradcheck(entmax, (z, alpha.requires_grad_()), eps=1e-6, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_the_core_weighs_by_entmax(causal: bool) -> None:
    core = build(Entmax.Config(), causal=causal)
    for mask in masks(40, causal=causal):
        q, k, v = inputs(mask.queries, mask.keys, groups=4)
        out = core(q, k, v, mask)
        scores = (q @ k.mT / 8**0.5).masked_fill(~seen(mask), float("-inf"))
        for head in range(4):
            alpha = 1 + torch.sigmoid(core.a[head])
            weights = threshold(scores[:, head], float(alpha))
            torch.testing.assert_close(out[:, head], weights @ v[:, head], rtol=1e-6, atol=1e-6)


def threshold(z: Tensor, alpha: float) -> Tensor:
    """Newton's method for tau, another way than the core's."""
    z = (alpha - 1) * z
    tau = z.amax(-1, keepdim=True) - 1
    for _ in range(200):
        gap = (z - tau).clamp(min=0)
        value = gap.pow(1 / (alpha - 1)).sum(-1, keepdim=True) - 1
        slope = (gap.pow(1 / (alpha - 1) - 1) / (alpha - 1)).sum(-1, keepdim=True)
        tau = tau + value / slope
    return (z - tau).clamp(min=0).pow(1 / (alpha - 1))


def test_a_row_that_sees_nothing_gets_nothing() -> None:
    z = torch.full((2, 5), float("-inf"), dtype=torch.float64)
    z[0, 1] = 0.3
    assert entmax(z, torch.tensor(1.5, dtype=z.dtype)).tolist() == [[0, 1, 0, 0, 0], [0] * 5]


@pytest.mark.parametrize("a", [-1e4, -40.0, 40.0])
def test_an_alpha_at_its_ends_has_finite_gradients(a: float) -> None:
    """As in the authors' code alpha is at least 1.01: at 1 the power of the formula has no bound."""
    core = build(Entmax.Config(), causal=True)
    core.a.data.fill_(a)
    q, k, v = (x.requires_grad_() for x in inputs(9, 9))
    out = core(q, k, v, next(iter(masks(9, causal=True, documents=False))))
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v, core.a))
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_heads_begin_with_different_alphas() -> None:
    dims = Dims(width=32, depth=2, vocabulary=32, length=64, causal=True)
    core = Entmax(Entmax.Config(), dims, 8, 4)
    values = draw(core.init["a"], (8,), 0, "a")
    assert len(set(values.tolist())) == 8
    assert (values.abs() < 4).all()
