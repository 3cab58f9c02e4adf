"""Variants of one run under one protocol: how many tokens, and how long, each takes to the loss of the reference.

The config of `xscale compare`, the validation curves of the finished runs, and their table and figure.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pydantic

from xscale.bench.train import TrainingSpeed
from xscale.core.config import Config, NonNegativeInt, decode
from xscale.core.errors import ConfigError, FaultError, nearest
from xscale.core.paths import PathText
from xscale.core.yaml_reader import parse
from xscale.observe.metrics import METRICS_FILE, read


class Comparison(Config):
    """Variants that are trained with several seeds and compared with a reference."""

    run: str
    """Config of the run that all variants override; a path relative to this file."""
    dir: PathText = "runs/compare"
    """Folder of the runs, the table and the figure."""
    seeds: tuple[NonNegativeInt, ...] = pydantic.Field(default=(0, 1, 2), min_length=1)
    """Each variant is trained once per seed."""
    reference: str
    """Variant whose final validation loss is the target of the others."""
    variants: dict[str, tuple[str, ...]] = pydantic.Field(min_length=1)
    """Name -> overrides, as on the command line."""

    def folder(self, variant: str, seed: int) -> Path:
        """Run folder of a variant and seed."""
        return Path(self.dir) / slug(variant) / f"seed-{seed}"


def slug(variant: str) -> str:
    """Folder name of a variant."""
    return re.sub(r"[^\w.-]+", "-", variant).strip("-")


def read_comparison(file: Path) -> Comparison:
    """Read a comparison file. ConfigError for missing, misspelt or ambiguous entries."""
    try:
        data = parse(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise ConfigError(str(file), f"the comparison cannot be read: {error.strerror}") from None
    if not isinstance(data, dict):
        raise ConfigError(
            str(file),
            "a comparison is a mapping",
            "For an example see configs/compare/experts.yaml.",
        )
    comparison = decode(Comparison, data)
    if comparison.reference not in comparison.variants:
        what = f"there is no variant '{comparison.reference}'"
        raise ConfigError(
            "reference", what, nearest(comparison.reference, list(comparison.variants))
        )
    if len({slug(name) for name in comparison.variants}) < len(comparison.variants):
        raise ConfigError(
            "variants",
            "two of these names give the same folder",
            "Use names that differ in letters.",
        )
    return comparison.model_copy(update={"run": str(file.parent / comparison.run)})


SPAN = 3
"""Evaluations in the trailing mean, which smooths the noise of single evaluations."""


@dataclass(frozen=True)
class LossCurve:
    """Smoothed validation losses of one run."""

    tokens: list[int]
    losses: list[float]

    @property
    def last(self) -> float:
        return self.losses[-1]

    def reaches(self, loss: float) -> float | None:
        """Tokens at which the curve first reaches `loss`, interpolated linearly between evaluations; None: never."""
        before: tuple[float, float] | None = None
        for tokens, current in zip(self.tokens, self.losses, strict=True):
            if current <= loss:
                if before is None or not math.isfinite(before[1]):
                    return float(tokens)
                fraction = (
                    (before[1] - loss) / (before[1] - current) if before[1] > current else 1.0
                )
                return before[0] + fraction * (tokens - before[0])
            before = (tokens, current)
        return None


def read_curve(folder: Path) -> LossCurve:
    """Read the curve of the run in `folder`. FaultError without evaluations."""
    tokens: dict[int, int] = {}
    evaluations: list[tuple[int, float]] = []
    path = folder / METRICS_FILE
    # A finished run is not trained again and writes nothing, so a file that was deleted stays away.
    for item in read(path) if path.exists() else ():
        if "tokens" in item:
            tokens[item["step"]] = item["tokens"]
        if "eval_loss" in item and item["step"] in tokens:
            loss = item["eval_loss"]
            evaluations.append((tokens[item["step"]], math.inf if loss is None else loss))
    if not evaluations:
        raise FaultError(
            f"{folder}: no evaluation in {METRICS_FILE}; delete the folder to train it again"
        )
    losses = [loss for _, loss in evaluations]
    smooth = [fmean(losses[max(0, at + 1 - SPAN) : at + 1]) for at in range(len(losses))]
    return LossCurve([count for count, _ in evaluations], smooth)


@dataclass(frozen=True)
class VariantResult:
    """Results of one variant over all seeds."""

    name: str
    curves: list[LossCurve]
    parameters: int
    active: int
    tokens_per_second: float
    tokens_ratio: list[float | None]
    """For each seed: tokens to the reference's last loss, over the reference's tokens; None: not reached."""
    time_ratio: list[float | None]
    """The same ratio of training time: tokens at the median speed of alternating steps."""
    processor_ratio: list[float | None]
    """The same ratio of CPU time, which other programs on the machine do not lengthen; None on a GPU too."""

    def row(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "variant": self.name,
            "parameters": self.parameters,
            "active_parameters": self.active,
            "last_loss": [curve.last for curve in self.curves],
            "tokens_per_second": self.tokens_per_second,
            "tokens_to_reference": self.tokens_ratio,
            "time_to_reference": self.time_ratio,
            "processor_time_to_reference": self.processor_ratio,
        }


def variant_results(
    curves: dict[str, list[LossCurve]],
    reference: str,
    speeds: dict[str, TrainingSpeed],
    sizes: dict[str, tuple[int, int]],
) -> list[VariantResult]:
    """Compute the results; `curves` has the curves of each variant, in one order of seeds."""
    results = []
    for name, of_variant in curves.items():
        tokens: list[float | None] = []
        for curve, reference_curve in zip(of_variant, curves[reference], strict=True):
            goal, reached = (
                reference_curve.reaches(reference_curve.last),
                curve.reaches(reference_curve.last),
            )
            assert goal is not None
            tokens.append(None if reached is None else reached / goal)
        variant_speed, reference_speed = speeds[name], speeds[reference]
        time = _times(tokens, reference_speed.tokens_per_second, variant_speed.tokens_per_second)
        busy = _times(
            tokens,
            reference_speed.tokens_per_processor_second,
            variant_speed.tokens_per_processor_second,
        )
        results.append(
            VariantResult(
                name, of_variant, *sizes[name], variant_speed.tokens_per_second, tokens, time, busy
            )
        )
    return results


def _times(
    ratios: list[float | None], reference: float | None, variant: float | None
) -> list[float | None]:
    """Convert ratios of tokens to ratios of time, given the tokens per second of the reference and of the variant."""
    if reference is None or variant is None:
        return [None] * len(ratios)
    return [None if ratio is None else ratio * reference / variant for ratio in ratios]


def table(results: list[VariantResult], reference: str) -> str:
    """Format one line per variant: mean, minimum and maximum over the seeds."""
    width = max(len(result.name) for result in results)
    heads = (
        "parameters",
        "active",
        "last validation loss",
        "tokens/s",
        "tokens to ref. loss",
        "time to ref. loss",
    )
    on_cpu = any(
        None not in result.processor_ratio for result in results if result.name == reference
    )
    seeds = len(results[0].curves)
    lines = [
        f"compared with {reference}, {seeds} seed{'s' if seeds > 1 else ''}; mean (min to max)"
    ]
    lines.append(
        f"{'':<{width}}  {heads[0]:>10}  {heads[1]:>8}  {heads[2]:<24}  {heads[3]:>8}  {heads[4]:<22}  "
        f"{heads[5]:<22}{'  CPU time to ref. loss' if on_cpu else ''}"
    )
    for result in results:
        losses = _spread([curve.last for curve in result.curves], 3)
        lines.append(
            f"{result.name:<{width}}  {result.parameters / 1e6:>9.2f}M  {result.active / 1e6:>7.2f}M  {losses:<24}  "
            f"{result.tokens_per_second:>8,.0f}  {_spread(result.tokens_ratio, 2):<22}  "
            f"{_spread(result.time_ratio, 2):<22}"
            + (f"  {_spread(result.processor_ratio, 2)}" if on_cpu else "")
        )
    return "\n".join(lines)


def _spread(values: list[float] | list[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"not reached by {len(values) - len(known)} of {len(values)}"
    return f"{fmean(known):.{digits}f} ({min(known):.{digits}f} to {max(known):.{digits}f})"


def figure(results: list[VariantResult], reference: str, path: Path) -> None:
    """Plot loss over tokens and over time: mean of the seeds in a band from minimum to maximum."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(10, 4), layout="constrained")
    for axes, label in zip(
        drawing.subplots(1, 2, sharey=True), ("tokens", "seconds of training"), strict=True
    ):
        for result in results:
            tokens = result.curves[0].tokens
            x = (
                tokens
                if label == "tokens"
                else [count / result.tokens_per_second for count in tokens]
            )
            losses_of_step = list(zip(*(curve.losses for curve in result.curves), strict=True))
            (line,) = axes.plot(x, [fmean(losses) for losses in losses_of_step], label=result.name)
            axes.fill_between(
                x,
                [min(losses) for losses in losses_of_step],
                [max(losses) for losses in losses_of_step],
                color=line.get_color(),
                alpha=0.15,
            )
        goal = fmean(
            curve.last for result in results if result.name == reference for curve in result.curves
        )
        axes.axhline(goal, color="grey", linewidth=0.8, linestyle="--")
        axes.set_ylim(top=goal + 1.2)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    drawing.axes[0].set_ylabel("validation loss")
    drawing.axes[0].legend()
    drawing.savefig(path, dpi=110)
