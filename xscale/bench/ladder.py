"""A ladder of runs: sizes x experts x tokens x seeds of one recipe, their losses, and what the fits of these predict.

The config of `xscale ladder`, and the points, fits and predictions that its report shows.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pydantic

from xscale.bench.scaling_fit import (
    DegenerateFitError,
    Interval,
    RunPoint,
    ScalingFit,
    fit_scaling_law,
)
from xscale.core.config import Config, NonNegativeInt, PositiveFloat, PositiveInt, decode
from xscale.core.errors import ConfigError, Problem, nearest
from xscale.core.paths import PathText
from xscale.core.yaml_reader import parse


class Ladder(Config):
    """Runs of several sizes, whose losses predict that of a larger one."""

    run: str
    """Config of the run that all sizes override; a path relative to this file."""
    dir: PathText = "runs/ladder"
    """Folder of the runs, the report and the JSON."""
    seeds: tuple[NonNegativeInt, ...] = pydantic.Field(default=(0,), min_length=1)
    """Each run is trained once per seed."""
    overrides: tuple[str, ...] = ()
    """Overrides of all runs, as on the command line."""
    sizes: dict[str, tuple[str, ...]] = pydantic.Field(min_length=1)
    """Name of each size, from small to large -> its overrides."""
    experts: dict[str, tuple[str, ...]] = pydantic.Field(default={"dense": ()}, min_length=1)
    """Name of each kind of feed-forward layer -> overrides on top of those of a size; each has a fit of its own."""
    tokens: tuple[PositiveInt, ...] = ()
    """Training tokens of the runs of each size, rounded to whole steps."""
    tokens_per_parameter: tuple[PositiveFloat, ...] = ()
    """Training tokens for each active parameter, in place of `tokens`."""
    held_out: tuple[str, ...] = ()
    """Sizes that are predicted by the fit of the others."""
    law: Literal["compute", "parametric"] = "parametric"
    """Fitted loss. compute: E + A / C^alpha on the runs that no cheaper run beats; parametric: E + A / N^alpha +
    B / D^beta on all runs."""
    resamples: int = pydantic.Field(default=200, ge=20)
    """Resampled fits, of which the intervals of 90 % are made."""


@dataclass(frozen=True)
class LadderRun:
    """One run of a ladder."""

    name: str
    """Name of its folder."""
    size: str
    experts: str
    seed: int
    overrides: tuple[str, ...]
    parameters: int
    """Active parameters."""
    tokens: int
    flops: float
    """Model FLOPs of training."""


def read_ladder(file: Path) -> Ladder:
    """Read a ladder file. ConfigError for missing, misspelt or ambiguous entries."""
    try:
        data = parse(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise ConfigError(str(file), f"the ladder cannot be read: {error.strerror}") from None
    if not isinstance(data, dict):
        raise ConfigError(
            str(file), "a ladder is a mapping", "For an example see configs/ladder/bytes.yaml."
        )
    ladder = decode(Ladder, data)
    if problems := _problems(ladder):
        raise ConfigError(problems)
    return ladder.model_copy(update={"run": str(file.parent / ladder.run)})


def _problems(ladder: Ladder) -> list[Problem]:
    problems = []
    if bool(ladder.tokens) == bool(ladder.tokens_per_parameter):
        what = (
            "give either tokens or tokens_per_parameter"
            if ladder.tokens
            else "the length of the runs is missing"
        )
        problems.append(
            Problem("tokens", what, "Take tokens_per_parameter: [20], or tokens: [1_000_000].")
        )
    for name in ladder.held_out:
        if name not in ladder.sizes:
            problems.append(
                Problem("held_out", f"there is no size '{name}'", nearest(name, list(ladder.sizes)))
            )
    if set(ladder.held_out) >= set(ladder.sizes):
        problems.append(
            Problem("held_out", "no size is left to fit", "Leave out at least three sizes.")
        )
    for key in ("sizes", "experts"):
        names = list(getattr(ladder, key))
        if len({file_name(name) for name in names}) < len(names):
            problems.append(
                Problem(
                    key,
                    "two of these names give the same folder",
                    "Use names that differ in letters.",
                )
            )
    for key in ("seeds", "tokens", "tokens_per_parameter"):
        values = getattr(ladder, key)
        if len(set(values)) < len(values):
            problems.append(
                Problem(
                    key, "a value is repeated: both runs would be the same", "Keep one of them."
                )
            )
    return problems


def file_name(text: str) -> str:
    """Name of a folder."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-")


@dataclass(frozen=True)
class LadderPrediction:
    """The loss that a fit predicts for the runs of a held-out size, and theirs."""

    run: LadderRun
    predicted: Interval
    losses: tuple[float, ...]
    """One for each seed that was run; empty: none."""

    @property
    def holds(self) -> bool | None:
        """Whether the losses are within the interval; None: no run is finished."""
        if not self.losses:
            return None
        return all(self.predicted.low <= loss <= self.predicted.high for loss in self.losses)


@dataclass(frozen=True)
class LadderResult:
    """The fit of one kind of feed-forward layer."""

    experts: str
    runs: tuple[LadderRun, ...]
    """Finished runs that were fitted, in the order of `points`."""
    points: tuple[RunPoint, ...]
    fit: ScalingFit
    predictions: tuple[LadderPrediction, ...]

    def encode(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "experts": self.experts,
            "law": self.fit.law,
            "constants": {
                name: asdict(value) for name, value in self.fit.named_constants().items()
            },
            "runs": [
                {"run": run.name, **asdict(point), "fitted": index in self.fit.used}
                for index, (run, point) in enumerate(zip(self.runs, self.points, strict=True))
            ],
            "predictions": [
                {
                    "size": prediction.run.size,
                    "tokens": prediction.run.tokens,
                    "flops": prediction.run.flops,
                    **asdict(prediction.predicted),
                    "losses": list(prediction.losses),
                    "holds": prediction.holds,
                }
                for prediction in self.predictions
            ],
        }


def fit_ladder(
    ladder: Ladder, runs: Sequence[LadderRun], losses: dict[str, float]
) -> list[LadderResult]:
    """Fit the finished runs of each kind of feed-forward layer; `losses` has them by the name of the run.

    ConfigError where they do not determine the constants.
    """
    results = []
    for experts in ladder.experts:
        finished = [run for run in runs if run.experts == experts and run.name in losses]
        fitted = [run for run in finished if run.size not in ladder.held_out]
        diverged = [run.name for run in fitted if not math.isfinite(losses[run.name])]
        if diverged:
            fix = "Lower its learning rate, or leave out its size."
            raise ConfigError("sizes", f"the loss of {diverged[0]} is not finite", fix)
        points = [_point(run, losses[run.name]) for run in fitted]
        try:
            fit = fit_scaling_law(points, ladder.law, ladder.resamples)
        except DegenerateFitError as error:
            fix = "Add sizes or tokens, train the runs that are missing, or take the other law."
            raise ConfigError("sizes", f"no fit of {experts}: {error}", fix) from None
        held_out = [run for run in runs if run.experts == experts and run.size in ladder.held_out]
        predictions = tuple(
            _prediction(fit, run, held_out, losses)
            for run in held_out
            if run.seed == ladder.seeds[0]
        )
        results.append(LadderResult(experts, tuple(fitted), tuple(points), fit, predictions))
    return results


def _point(run: LadderRun, loss: float) -> RunPoint:
    return RunPoint(run.parameters, run.tokens, run.flops, loss)


def _prediction(
    fit: ScalingFit, run: LadderRun, held_out: Sequence[LadderRun], losses: dict[str, float]
) -> LadderPrediction:
    """Predict a run, and collect the losses of its seeds."""
    seeds = [other for other in held_out if (other.size, other.tokens) == (run.size, run.tokens)]
    known = tuple(losses[other.name] for other in seeds if other.name in losses)
    return LadderPrediction(run, fit.predict(run.parameters, run.tokens, run.flops), known)


def table(results: Sequence[LadderResult]) -> str:
    """Format the constants and predictions."""
    lines = []
    for result in results:
        constants = result.fit.named_constants()
        formula = (
            "E + A / C^alpha" if result.fit.law == "compute" else "E + A / N^alpha + B / D^beta"
        )
        lines.append(
            f"{result.experts}: loss = {formula}, {len(result.fit.used)} of {len(result.points)} runs fitted"
        )
        for name, value in constants.items():
            lines.append(
                f"  {name:<6} {value.value:<10.4g} 90 % interval {value.low:.4g} to {value.high:.4g}"
            )
        if result.fit.at_bound:
            lines.append(
                "  a constant is 0 or an exponent at an end of its range: the runs do not determine it"
            )
        for prediction in result.predictions:
            lines.append(f"  {_sentence(prediction)}")
    return "\n".join(lines)


def _sentence(prediction: LadderPrediction) -> str:
    predicted, run = prediction.predicted, prediction.run
    text = f"{run.size}, {run.tokens:,} tokens: predicted {predicted.value:.4f}"
    text += f" (90 % interval {predicted.low:.4f} to {predicted.high:.4f})"
    if prediction.holds is None:
        return f"{text}, not run"
    reached = ", ".join(f"{loss:.4f}" for loss in prediction.losses)
    return (
        f"{text}, reached {reached}: {'within' if prediction.holds else 'outside of'} the interval"
    )
