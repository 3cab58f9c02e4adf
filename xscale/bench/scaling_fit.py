"""Scaling laws fitted to the losses of finished runs, with intervals from a bootstrap over residuals.

`compute`: L = E + A / C^alpha on the runs that no cheaper run beats (Henighan et al. 2020, with Hoffmann et al. 2022's
frontier). `parametric`: L = E + A / N^alpha + B / D^beta on all runs (Hoffmann et al. 2022, equation 10).

The relative squared error is minimised: the exponents by grids that shrink, the constants, none of which is negative,
in closed form. Equation 10 is fitted in the paper by the Huber loss of the logarithm's error; no error is an outlier
here.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Law = Literal["compute", "parametric"]
EXPONENTS = (0.01, 2.0)
"""Range in which exponents are searched."""
COARSE, FINE, ROUNDS = 11, 5, 9
"""Exponents of the first grid along a dimension, of the later ones, and how often the grid shrinks."""
QUANTILES = (5.0, 95.0)
"""Percentiles of the bootstrap that bound an interval of 90 %."""
BOOTSTRAP_SEED = 0


class DegenerateFitError(ValueError):
    """Runs that do not determine the constants; the message is a clause."""


@dataclass(frozen=True)
class RunPoint:
    """A finished run."""

    parameters: float
    """N, active parameters."""
    tokens: float
    """D, training tokens."""
    flops: float
    """C, model FLOPs of training."""
    loss: float
    """Validation loss at the end, in nats a token."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval of 90 %."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ScalingFit:
    """A law with its constants, and the constants of each resampled fit."""

    law: Law
    scales: Array
    """[terms] unit of each term's quantity: the geometric mean over the runs."""
    exponents: Array
    """[1 + R, terms]: those of the fit first, then those of R resampled ones."""
    constants: Array
    """[1 + R, 1 + terms]: E, and the coefficient of each term in units of `scales`."""
    residuals: Array
    """[runs] relative errors (loss - fit) / fit, widened for the degrees of freedom that the fit took."""
    used: tuple[int, ...]
    """Indices of the runs that were fitted."""

    def predict(self, parameters: float, tokens: float, flops: float) -> Interval:
        """Predict the loss of a run, with the interval in which a run's loss is expected."""
        losses = self.curve(parameters, tokens, flops)
        generator = np.random.default_rng(BOOTSTRAP_SEED + 1)
        noisy = losses[1:] * (1 + generator.choice(self.residuals, len(losses) - 1))
        low, high = np.percentile(noisy, QUANTILES)
        return Interval(float(losses[0]), float(low), float(high))

    def curve(self, parameters: float, tokens: float, flops: float) -> Array:
        """Return the loss by the fit and by each resampled one, [1 + R]."""
        quantities = np.array([flops] if self.law == "compute" else [parameters, tokens])
        terms = (quantities / self.scales) ** -self.exponents  # [1 + R, terms]
        losses: Array = self.constants[:, 0] + (self.constants[:, 1:] * terms).sum(1)
        return losses

    def named_constants(self) -> dict[str, Interval]:
        """Return E and each term's coefficient and exponent, in units of one FLOP, parameter or token."""
        coefficients = self.constants[:, 1:] * self.scales**self.exponents
        columns = {"E": self.constants[:, 0]}
        for index, (coefficient, exponent) in enumerate(
            (("A", "alpha"), ("B", "beta"))[: len(self.scales)]
        ):
            columns |= {coefficient: coefficients[:, index], exponent: self.exponents[:, index]}
        return {name: _interval(values) for name, values in columns.items()}

    @property
    def at_bound(self) -> bool:
        """Whether a constant is 0, or an exponent at an end of its range: the runs do not determine it."""
        low, high = EXPONENTS
        exponents = (self.exponents[0] < 1.01 * low) | (self.exponents[0] > 0.99 * high)
        return bool(np.any(exponents) or np.any(self.constants[0] == 0))


def _interval(values: Array) -> Interval:
    low, high = np.percentile(values[1:], QUANTILES)
    return Interval(float(values[0]), float(low), float(high))


def fit_scaling_law(points: Sequence[RunPoint], law: Law, resamples: int = 200) -> ScalingFit:
    """Fit a law to runs. DegenerateFitError where they do not determine it."""
    losses = np.array([point.loss for point in points], dtype=np.float64)
    if not np.all(np.isfinite(losses) & (losses > 0)):
        raise DegenerateFitError("a loss is not a positive number")
    used = frontier(points) if law == "compute" else tuple(range(len(points)))
    if law == "compute":
        columns = np.array([[points[index].flops] for index in used])
    else:
        columns = np.array([[point.parameters, point.tokens] for point in points])
    losses = losses[list(used)]
    _require_determined(columns, law, len(points))
    scales = np.exp(np.log(columns).mean(0))
    exponents, constants = _fit(columns / scales, losses)
    fitted = _losses(columns / scales, exponents, constants)
    if np.ptp(fitted) <= 1e-6 * fitted.mean():
        raise DegenerateFitError("the loss does not fall with more compute")
    freedom = max(1, len(losses) - 1 - 2 * len(scales))
    residuals = (losses / fitted - 1) * (len(losses) / freedom) ** 0.5
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    fits = [(exponents, constants)]
    for _ in range(resamples):
        resampled = fitted * (1 + generator.choice(residuals, len(losses)))
        fits.append(_fit(columns / scales, resampled))
    stacked = [np.stack(values) for values in zip(*fits, strict=True)]
    return ScalingFit(law, scales, stacked[0], stacked[1], residuals, used)


def frontier(points: Sequence[RunPoint]) -> tuple[int, ...]:
    """Return the indices of the runs with a lower loss than every run of at most their compute."""
    order = sorted(range(len(points)), key=lambda index: (points[index].flops, points[index].loss))
    best, kept = float("inf"), []
    for index in order:
        if points[index].loss < best:
            best = points[index].loss
            kept.append(index)
    return tuple(kept)


def _require_determined(columns: Array, law: Law, runs: int) -> None:
    """Raise DegenerateFitError where there are fewer runs, or fewer different ones, than constants need."""
    terms = columns.shape[1]
    names, least = (("compute",), 4) if law == "compute" else (("parameters", "tokens"), 6)
    if len(columns) < least:
        of = f" of {runs} that no cheaper run beats" if law == "compute" else ""
        constants = 1 + 2 * terms
        raise DegenerateFitError(
            f"{constants} constants need at least {least} runs, and there are {len(columns)}{of}"
        )
    for name, column in zip(names, columns.T, strict=True):
        different = len(np.unique(column))
        if different < 3:
            raise DegenerateFitError(
                f"an exponent of {name} needs 3 different values, and there are {different}"
            )


def _fit(columns: Array, losses: Array) -> tuple[Array, Array]:
    """Return the exponents [terms] and constants [1 + terms] of least relative squared error."""
    terms = columns.shape[1]
    log_low, log_high = np.log(EXPONENTS)
    centre, reach = np.full(terms, (log_low + log_high) / 2), (log_high - log_low) / 2
    best_error, best = np.inf, (np.zeros(terms), np.zeros(1 + terms))
    for round_number in range(ROUNDS):
        count = COARSE if round_number == 0 else FINE
        axes = [
            np.clip(np.linspace(middle - reach, middle + reach, count), log_low, log_high)
            for middle in centre
        ]
        grid = np.exp(
            np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, terms)
        )  # [G, terms]
        errors, constants = _least_squares(columns, losses, grid)
        index = int(errors.argmin())
        if errors[index] < best_error:
            best_error, best = float(errors[index]), (grid[index], constants[index])
            centre = np.log(grid[index])
        reach *= 3 / count if round_number == 0 else 0.5
    return best


def _least_squares(columns: Array, losses: Array, exponents: Array) -> tuple[Array, Array]:
    """Return errors [G] and constants [G, 1 + terms], none negative, for each of the exponents [G, terms]."""
    powers = columns[None] ** -exponents[:, None]  # [G, runs, terms]
    design = np.concatenate((np.ones((*powers.shape[:2], 1)), powers), 2) / losses[None, :, None]
    gram, targets = design.transpose(0, 2, 1) @ design, design.sum(1)
    best_errors = np.full(len(design), np.inf)
    best = np.zeros((len(design), design.shape[2]))
    # The least squares without negative constants are the plain ones of some subset of them.
    for size in range(1, design.shape[2] + 1):
        for subset in itertools.combinations(range(design.shape[2]), size):
            # [G, subset]; the sum keeps a matrix of equal columns from being singular.
            chosen = gram[np.ix_(range(len(gram)), subset, subset)] + 1e-13 * np.eye(size)
            values = np.linalg.solve(chosen, targets[:, list(subset), None])[..., 0]
            errors = np.square((design[:, :, subset] * values[:, None]).sum(2) - 1).sum(1)
            better = (values >= 0).all(1) & (errors < best_errors)
            best_errors[better] = errors[better]
            best[better] = 0.0
            best[np.ix_(better, subset)] = values[better]
    return best_errors, best


def _losses(columns: Array, exponents: Array, constants: Array) -> Array:
    losses: Array = constants[0] + (columns**-exponents) @ constants[1:]
    return losses
