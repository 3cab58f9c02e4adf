"""Fits of scaling laws: constants that are known are within their intervals; runs that determine none are refused."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from xscale.bench.scaling_fit import DegenerateFitError, Law, RunPoint, fit_scaling_law, frontier

E, A, ALPHA, B, BETA = 1.7, 400.0, 0.34, 410.0, 0.28
SIZES = [1e6, 3e6, 1e7, 3e7, 1e8]


def by_compute(flops: float) -> float:
    return E + 60.0 * flops**-0.15


def by_parameters_and_tokens(parameters: float, tokens: float) -> float:
    """Hoffmann et al. 2022, equation 10, with constants about theirs."""
    return E + A / parameters**ALPHA + B / tokens**BETA


def runs(law: Law, noise: float, seed: int = 0) -> list[RunPoint]:
    generator = np.random.default_rng(seed)
    if law == "compute":
        grid = [(size, 20 * size) for size in [*SIZES, 3e8, 1e9]]
    else:
        grid = [(size, ratio * size) for size, ratio in itertools.product(SIZES, (5, 20, 80))]
    points = []
    for parameters, tokens in grid:
        flops = 6 * parameters * tokens
        loss = by_compute(flops) if law == "compute" else by_parameters_and_tokens(parameters, tokens)
        points.append(RunPoint(parameters, tokens, flops, loss * (1 + noise * generator.standard_normal())))
    return points


TRUE: dict[Law, dict[str, float]] = {
    "compute": {"E": E, "A": 60.0, "alpha": 0.15},
    "parametric": {"E": E, "A": A, "alpha": ALPHA, "B": B, "beta": BETA},
}


@pytest.mark.parametrize("law", ["compute", "parametric"])
def test_constants_without_noise_are_recovered(law: Law) -> None:
    constants = fit_scaling_law(runs(law, 0.0), law, resamples=4).named_constants()
    assert constants.keys() == TRUE[law].keys()
    for name, value in TRUE[law].items():
        assert constants[name].value == pytest.approx(value, rel=0.03), name


@pytest.mark.parametrize("law", ["compute", "parametric"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_known_constants_are_within_the_intervals(law: Law, seed: int) -> None:
    points = runs(law, 0.002, seed)
    fit = fit_scaling_law(points, law, resamples=100)
    intervals = fit.named_constants()
    inside = [intervals[name].low <= value <= intervals[name].high for name, value in TRUE[law].items()]
    # The intervals are of 90 %: one of several may miss.
    assert sum(inside) >= len(inside) - 1, intervals
    assert all(interval.low <= interval.value <= interval.high for interval in intervals.values())
    parameters, tokens = 1e10, 2e11
    flops = 6 * parameters * tokens
    prediction = fit.predict(parameters, tokens, flops)
    true = by_compute(flops) if law == "compute" else by_parameters_and_tokens(parameters, tokens)
    assert prediction.low <= true <= prediction.high
    assert prediction.value == pytest.approx(true, rel=0.05)


def test_another_law_is_outside_of_the_intervals() -> None:
    """Negative control: an exponent of twice the size."""
    points = [replace(point, loss=E + 60.0**2 * point.flops**-0.3) for point in runs("compute", 0.0)]
    interval = fit_scaling_law(points, "compute", resamples=50).named_constants()["alpha"]
    assert not interval.low <= 0.15 <= interval.high


def test_noise_widens_the_prediction() -> None:
    narrow, wide = (
        fit_scaling_law(runs("compute", noise), "compute", resamples=100).predict(1e10, 2e11, 1.2e22)
        for noise in (0.0005, 0.01)
    )
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)


def test_the_frontier_leaves_out_runs_that_a_cheaper_one_beats() -> None:
    losses = {1.0: 3.0, 2.0: 3.5, 3.0: 2.5, 4.0: 2.5, 5.0: 2.0}
    assert frontier([RunPoint(1, 1, flops, loss) for flops, loss in losses.items()]) == (0, 2, 4)


@pytest.mark.parametrize(
    ("points", "law", "text"),
    [
        (runs("compute", 0.0)[:3], "compute", "3 constants need at least 4 runs, and there are 3 of 3 that no cheaper"),
        (runs("parametric", 0.0)[:5], "parametric", "5 constants need at least 6 runs, and there are 5"),
        (
            [replace(point, parameters=1e6 if index % 2 else 2e6) for index, point in enumerate(runs("compute", 0.0))],
            "parametric",
            "an exponent of parameters needs 3 different values, and there are 2",
        ),
        ([replace(point, loss=float("nan")) for point in runs("compute", 0.0)], "compute", "a loss is not a positive"),
        ([replace(point, loss=2.0) for point in runs("parametric", 0.0)], "parametric", "does not fall with more comp"),
        (
            [replace(point, loss=2.0 + index) for index, point in enumerate(runs("parametric", 0.0))],
            "parametric",
            "does not fall with more compute",
        ),
    ],
)
def test_runs_that_determine_no_constants_are_refused(points: list[RunPoint], law: Law, text: str) -> None:
    with pytest.raises(DegenerateFitError, match=text):
        fit_scaling_law(points, law, resamples=2)
