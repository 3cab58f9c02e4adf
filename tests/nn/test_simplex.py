"""Projection onto the simplex: the conditions of the nearest point, and what stays where it is."""

import pytest
import torch

from tests.conformance.made import drawn
from xscale.nn.materialize import materialize
from xscale.nn.post_step import update_non_gradient_state
from xscale.nn.simplex import Simplex, nearest_on_simplex


@pytest.mark.parametrize("size", [1, 2, 7, 40])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_no_point_of_the_simplex_is_nearer(size: int, scale: float) -> None:
    """p is nearest to x if (x - p) . (q - p) <= 0 for every corner q of the simplex."""
    for seed in range(5):
        x = scale * drawn(size, seed=seed)
        p = nearest_on_simplex(x)
        assert p.min() >= 0
        torch.testing.assert_close(p.sum(), torch.ones((), dtype=x.dtype))
        slopes = ((x - p) * (torch.eye(size, dtype=x.dtype) - p)).sum(1)
        assert slopes.max() <= 1e-9 * max(scale, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_point_of_the_simplex_stays_bit_for_bit(dtype: torch.dtype) -> None:
    for seed in range(20):
        p = nearest_on_simplex(drawn(9, seed=seed).to(dtype))
        assert torch.equal(nearest_on_simplex(p), p)


def test_it_starts_even_and_is_projected_after_a_step() -> None:
    simplex = Simplex(4)
    materialize(simplex, 0, dtype=torch.float64)
    assert simplex.weight.tolist() == [0.25] * 4
    with torch.no_grad():
        simplex.weight.add_(torch.tensor([0.5, 0.0, -0.5, 0.0]))
    update_non_gradient_state(simplex, {})
    torch.testing.assert_close(simplex.weight.detach(), torch.tensor([2 / 3, 1 / 6, 0.0, 1 / 6], dtype=torch.float64))
