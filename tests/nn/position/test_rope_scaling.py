"""RoPE for longer texts: each method against its formula, written channel by channel; what is refused."""

import math
from typing import Any

import pytest
import torch

from tests.conformance.made import dims, drawn
from tests.nn.position.test_positions import at
from xscale.nn.position.rope import Rope, RopeScaling

BASE, PAIRS, ORIGINAL, FACTOR = 10_000.0, 16, 64, 8.0
POSITIONS = (0, 3, 700)


def linear(pair: int, length: int) -> float:
    """Chen et al. 2023, equation 4: position m is that of m L / L'."""
    return BASE ** (-pair / PAIRS) / FACTOR


def dynamic(pair: int, length: int) -> float:
    """bloc97 2023: base' = base * s^(d / (d - 2)), with emozilla's s = factor l / L - (factor - 1)."""
    stretch = FACTOR * max(length, ORIGINAL) / ORIGINAL - (FACTOR - 1)
    width = 2 * PAIRS
    return (BASE * stretch ** (width / (width - 2))) ** (-2 * pair / width)


def llama3(pair: int, length: int) -> float:
    """Three ranges of wavelengths: short ones stay, long ones are multiplied, those between are mixed."""
    rate = BASE ** (-pair / PAIRS)
    wavelength = 2 * math.pi / rate
    if wavelength < ORIGINAL / 4:
        return rate
    if wavelength > ORIGINAL / 1:
        return rate / FACTOR
    smooth = (ORIGINAL / wavelength - 1) / (4 - 1)
    return (1 - smooth) * rate / FACTOR + smooth * rate


def yarn(pair: int, length: int) -> float:
    """Peng et al. 2024, NTK by parts, with the ramp over channels of their code: 32 rotations, and one."""
    rate, width = BASE ** (-pair / PAIRS), 2 * PAIRS

    def channel(rotations: float) -> float:
        return width * math.log(ORIGINAL / (rotations * 2 * math.pi)) / (2 * math.log(BASE))

    low, high = max(math.floor(channel(32)), 0), min(math.ceil(channel(1)), width - 1)
    mixed = min(max((pair - low) / (high - low), 0), 1)
    return rate / FACTOR * mixed + rate * (1 - mixed)


@pytest.mark.parametrize(
    ("method", "rate", "gain"),
    [
        ("linear", linear, 1.0),
        ("dynamic", dynamic, 1.0),
        ("llama3", llama3, 1.0),
        ("yarn", yarn, 0.1 * math.log(FACTOR) + 1),
    ],
)
def test_each_method_is_its_formula(method: Any, rate: Any, gain: float) -> None:
    original = None if method == "linear" else ORIGINAL
    scaling = RopeScaling(method=method, factor=FACTOR, original_length=original)
    assert Rope.check(Rope.Config(scaling=scaling), dims(length=ORIGINAL), "position") == []
    part = Rope(Rope.Config(scaling=scaling), dims(), 1, 2 * PAIRS)
    x = drawn(1, 1, len(POSITIONS), 2 * PAIRS)
    turned = part.rotate(x, at(*POSITIONS))[0, 0]
    plain = Rope(Rope.Config(), dims(), 1, 2 * PAIRS).rotate(x, at(*POSITIONS))[0, 0]
    assert not torch.allclose(turned, plain, rtol=1e-2)
    for row, position in enumerate(POSITIONS):
        for pair in range(PAIRS):
            first, second = x[0, 0, row, pair].item(), x[0, 0, row, pair + PAIRS].item()
            angle = position * rate(pair, max(POSITIONS) + 1)
            cosine, sine = gain * math.cos(angle), gain * math.sin(angle)
            assert turned[row, pair].item() == pytest.approx(first * cosine - second * sine, abs=1e-12)
            assert turned[row, pair + PAIRS].item() == pytest.approx(second * cosine + first * sine, abs=1e-12)


def test_dynamic_changes_nothing_within_the_original_length() -> None:
    scaling = RopeScaling(method="dynamic", factor=FACTOR, original_length=ORIGINAL)
    x = drawn(1, 1, 2, 8)
    scaled, plain = (Rope(Rope.Config(scaling=one), dims(), 1, 8).rotate(x, at(0, 63)) for one in (scaling, None))
    torch.testing.assert_close(scaled, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("scaling", "refusal"),
    [
        ({"method": "yarn"}, "original_length: 'yarn' needs the longest text"),
        ({"method": "linear", "original_length": 64}, "original_length: 'linear' does not read it"),
        ({"method": "llama3", "original_length": 64, "beta_fast": 9.0}, "method=yarn"),
        ({"method": "dynamic", "original_length": 64}, "texts of 128 tokens are trained on"),
        ({"method": "llama3", "original_length": 64, "low_frequency": 4.0}, "must be < high_frequency=4.0"),
        ({"method": "yarn", "original_length": 64, "beta_slow": 32.0}, "must be < beta_fast=32.0"),
    ],
)
def test_what_no_method_can_do_is_refused(scaling: dict[str, Any], refusal: str) -> None:
    config = Rope.Config(scaling=RopeScaling(factor=2.0, **scaling))
    (problem,) = Rope.check(config, dims(length=128), "position")
    assert refusal in str(problem)
    assert problem.advice
