"""The Gaussian Transformer's prior against its formula, and its limits."""

import math

import pytest
import torch

from tests.conformance.made import dims
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.nn.position.gaussian import Gaussian
from xscale.parallel.precision.precision import apply


def made(w: list[float], b: list[float], sigma: float = math.sqrt(0.5)) -> Gaussian:
    """A part with these parameters; at the default sigma the weight is the paper's w."""
    part = Gaussian(Gaussian.Config(sigma=sigma), dims(), len(w), 4)
    part.weight.data, part.offset.data = (torch.tensor(one, dtype=torch.float64) for one in (w, b))
    return part


def test_the_prior_is_its_formula() -> None:
    w, b, queries, keys = [0.3, 1.7], [-0.9, -4.0], [3, 60], [0, 3, 4, 61, 5000]
    bias = made(w, b).bias(torch.tensor([queries]), torch.tensor([keys]))
    assert bias.shape == (1, 2, 2, 5)
    for head in range(2):
        for row, i in enumerate(queries):
            for column, j in enumerate(keys):
                assert bias[0, head, row, column].item() == pytest.approx(-abs(w[head] * (i - j) ** 2 + b[head]))


@pytest.mark.parametrize(("w", "b"), [(-0.3, -0.9), (0.3, 0.9)])
def test_the_signs_of_the_parameters_do_not_matter(w: float, b: float) -> None:
    """w >= 0 and b <= 0 hold, whatever the optimizer does."""
    places = torch.arange(9)[None]
    assert torch.equal(made([w], [b]).bias(places, places), made([0.3], [-0.9]).bias(places, places))


def test_before_training_the_factor_is_a_gaussian_of_sigma() -> None:
    places = torch.arange(40)[None]
    factor = made([1.0], [0.0], sigma=5.0).bias(places, places).exp()[0, 0]
    for distance in (0, 1, 5, 30):
        assert factor[distance, 0].item() == pytest.approx(math.exp(-(distance**2) / (2 * 5.0**2)))


def test_the_offset_lowers_the_weight_of_the_token_itself() -> None:
    places = torch.arange(5)[None]
    bias = made([1.0], [-1.0]).bias(places, places)[0, 0]
    assert bias[2].tolist() == pytest.approx([-3, 0, -1, 0, -3])


def test_both_parameters_learn() -> None:
    part, places = made([0.5, 0.1], [-0.2, -0.3]), torch.arange(6)[None]
    part.bias(places, places).sum().backward()
    step, before = 1e-6, part.bias(places, places).sum().item()
    for parameter in (part.weight, part.offset):
        assert parameter.grad is not None
        for head in range(2):
            parameter.data[head] += step
            slope = (part.bias(places, places).sum().item() - before) / step
            parameter.data[head] -= step
            assert parameter.grad[head].item() == pytest.approx(slope, rel=1e-4)
            assert slope != 0


def test_far_distances_are_exact_in_bfloat16() -> None:
    part = made([1.0], [0.0], sigma=1000.0).float()
    apply(part, torch.bfloat16, torch.float32)
    bias = part.bias(torch.tensor([[4097, 4098]]), torch.tensor([[0]]))[0, 0, :, 0]
    assert bias.dtype == torch.float32
    assert bias.tolist() == pytest.approx([-(4097**2) / 2e6, -(4098**2) / 2e6])


def test_a_width_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="sigma: must be > 0, got 0"):
        decode(Gaussian.Config, {"sigma": 0})
