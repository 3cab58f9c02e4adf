"""One page on several runs: what differs in their configs, their curves with seeds as bands, the best of them."""

import glob
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any

from xscale.core.compose import leaves
from xscale.core.errors import ConfigError, counted
from xscale.core.files.atomic_write import write_atomically
from xscale.core.files.run_near import run_near
from xscale.core.yaml_writer import flow_text
from xscale.observe.format import duration, page_bytes, printable, quantity
from xscale.observe.record import RECORD_NAME, History, Record, load_history, read_record, value_at
from xscale.observe.report.chart import Curve, SeedRange, chart, smooth
from xscale.observe.report.sections import STYLES, by_axis, last, median, section
from xscale.observe.report.style import STYLE

SEEDS = ("run.seed",)
"""Keys in which repetitions of one config differ."""
NAMES = ("run.dir", "run.name", "run.allow_changed", "run.allow_links")
"""Keys that say nothing about what a run computes."""
AXES = ("tokens", "steps", "time")
"""Quantities that the curves can be drawn against; the first is shown first."""
COLOURED = 10
"""Most groups of runs with a colour and a dash of their own; the others are drawn faintly."""
POINTS = 200
"""Points at which the curves of seeds are averaged."""


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """A run: its record and its numbers."""

    folder: Path
    record: Record
    history: History

    @cached_property
    def config(self) -> dict[str, Any]:
        """Dotted key -> value."""
        return {key.lstrip("."): value for key, value in leaves(dict(self.record.facts.config), "")}

    @cached_property
    def seconds(self) -> list[float]:
        """Seconds of training at each logged step, over restarts: a process counts from its own start.

        Another process begins at the first step after one that the record says it resumed from; records of earlier
        versions do not say it, and there only seconds that fall show it.
        """
        offset = 0.0
        seconds_before = 0.0
        step_before = None
        summed = []
        for step, seconds in zip(self.history.steps, self.history.scalars["seconds"], strict=True):
            resumed = (
                any(step_before <= start < step for start in self.record.resumed_from)
                if step_before
                else False
            )
            if seconds < seconds_before or resumed:
                offset += seconds_before
            seconds_before, step_before = seconds, step
            summed.append(offset + seconds)
        return summed

    def positions(self, axis: str) -> list[float]:
        """Position of each logged step along an axis of `AXES`."""
        if axis == "time":
            return self.seconds
        return (
            [*map(float, self.history.steps)]
            if axis == "steps"
            else list(self.history.scalars["tokens"])
        )

    def evaluated(self, measure: str, axis: str) -> tuple[list[float], list[float]]:
        """Positions and values of a measure of the evaluations, without those that lack it."""
        positions = self.positions(axis)
        pairs = [
            (value_at(self.history.steps, positions, item["step"]), float(item[measure]))
            for item in self.history.evaluations
            if item.get(measure) is not None and math.isfinite(item[measure])
        ]
        return [x for x, _ in pairs], [y for _, y in pairs]

    def course(self, name: str, axis: str) -> tuple[list[float], list[float]]:
        """Positions and smoothed values of a number that is logged at each step."""
        values = self.history.scalars[name]
        return self.positions(axis), smooth(values, max(1, len(values) // 20))

    def best(self, measure: str) -> tuple[float, int] | None:
        """Lowest value of a measure of the evaluations and its step; None without one."""
        known = [
            (float(item[measure]), int(item["step"]))
            for item in self.history.evaluations
            if item.get(measure) is not None and math.isfinite(item[measure])
        ]
        return min(known, default=None)


@dataclass(frozen=True)
class RunGroup:
    """Runs whose configs are equal but for the seed."""

    label: str
    style: str
    runs: tuple[ComparedRun, ...]


def find_runs(patterns: Sequence[str]) -> list[Path]:
    """The run folders that `patterns` name: run folders, folders that contain some at any depth, or glob patterns.

    Errors: ConfigError for a pattern without a run that has a record (observe.report=true).
    """
    run_folders: dict[Path, Path] = {}
    for pattern in patterns:
        folders = (
            [Path(pattern)]
            if Path(pattern).exists()
            else [Path(match) for match in sorted(glob.glob(pattern))]
        )
        runs = [run for folder in folders for run in _runs_below(folder)]
        if not runs:
            what = f"contains no run with a {RECORD_NAME}" if folders else "there is no such folder"
            fix = run_near(Path(pattern)) if not folders else ""
            fix = fix or (
                "Give folders of runs that were trained with observe.report=true, a folder of them, or a pattern."
            )
            raise ConfigError(pattern, what, fix)
        run_folders |= {run.resolve(): run for run in runs if run.resolve() not in run_folders}
    return list(run_folders.values())


def _runs_below(folder: Path) -> list[Path]:
    if (folder / RECORD_NAME).is_file():
        return [folder]
    return sorted(record.parent for record in folder.rglob(RECORD_NAME)) if folder.is_dir() else []


def build_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Write one page on the runs in `folders` to `path`, and return it.

    Errors: ConfigError where a run's record cannot be read; OSError.
    """
    runs = [ComparedRun(folder, read_record(folder), load_history(folder)) for folder in folders]
    write_atomically(path, page_bytes(page(runs)))
    return path


def page(runs: Sequence[ComparedRun]) -> str:
    """The whole document."""
    keys = differing_keys(runs)
    groups = group_runs(runs, keys)
    measure = "bits_per_byte" if all(run.best("bits_per_byte") for run in runs) else "eval_loss"
    title = f"{len(runs)} runs compared"
    seeds = max(len(group.runs) for group in groups)
    note = (
        ""
        if seeds == 1
        else " A curve is the mean of the runs that differ in the seed alone; its band is their range."
    )
    parts = [
        f'<header><h1>{title}</h1><p class="lead">{len(groups)} configs, '
        f"up to {counted(seeds, 'seed')} of each.{note}</p></header>",
        section("Best runs", _ranking(runs, groups, measure)),
        section("Learning", _curves(groups)),
        section("What differs in the configs", _differences(groups, keys)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>{''.join(parts)}</body></html>\n"
    )


def differing_keys(runs: Sequence[ComparedRun]) -> list[str]:
    """Dotted keys that not all configs have with one value, without `SEEDS` and `NAMES`."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    return [
        key
        for key in keys
        if key not in (*SEEDS, *NAMES) and len({flow_text(run.config.get(key)) for run in runs}) > 1
    ]


def group_runs(runs: Sequence[ComparedRun], keys: Sequence[str]) -> list[RunGroup]:
    """The runs by their values of `keys`, in the order given; each with a label and a style of its own."""
    by_values: dict[tuple[str, ...], list[ComparedRun]] = {}
    for run in runs:
        by_values.setdefault(tuple(_value(run, key) for key in keys), []).append(run)
    short = _short_names(keys)
    groups = []
    for number, (values, members) in enumerate(by_values.items()):
        label = ", ".join(
            f"{short[key]}={value}" for key, value in zip(keys, values, strict=True) if value != "–"
        )
        if len(by_values) == 1 or len(label) > 60 or not label:
            label = members[0].folder.name
        dashed = " dashed" if number >= len(STYLES) else ""
        style = STYLES[number % len(STYLES)] + dashed if number < COLOURED else "faint"
        groups.append(RunGroup(label, style, tuple(members)))
    return groups


def _value(run: ComparedRun, key: str) -> str:
    """The value of a key as YAML on one line; a dash where the config does not have it."""
    return flow_text(run.config[key]) if key in run.config else "–"


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last word of each key, or two where one would name two of them, and so on."""
    short = {}
    for key in keys:
        words = key.split(".")
        tails = (".".join(words[-count:]) for count in range(1, len(words) + 1))
        short[key] = next(
            (
                tail
                for tail in tails
                if sum(f".{other}".endswith(f".{tail}") for other in keys) == 1
            ),
            key,
        )
    return short


def _curves(groups: Sequence[RunGroup]) -> str:
    """Charts against each axis; radio buttons choose one, without a script."""
    drawings = {}
    for axis in AXES:
        unit = "seconds" if axis == "time" else axis
        drawn = "".join(
            _chart(
                groups,
                partial(ComparedRun.evaluated, measure=measure, axis=axis),
                title,
                unit,
                note,
            )
            for measure, (title, note) in _EVALUATED.items()
        )
        drawn += "".join(
            _chart(groups, partial(ComparedRun.course, name=name, axis=axis), title, unit, note)
            for name, (title, note) in _LOGGED.items()
        )
        drawings[axis] = drawn
    return by_axis(drawings)


_EVALUATED = {
    "eval_loss": (
        "Validation loss, nats a token",
        "Lower is better, where the runs have one tokenizer and one text.",
    ),
    "bits_per_byte": ("Bits per byte", "Lower is better, and comparable between tokenizers."),
}
_LOGGED = {
    "loss": (
        "Training loss, nats a token (smoothed)",
        "Lower is better, where the runs have one objective; a gap that the bands of the seeds cover is no difference.",
    ),
    "tokens_per_second": (
        "Tokens a second (smoothed)",
        "Higher is better, on the same machine; dips are evaluations and saves.",
    ),
}
"""Number -> title of its chart and the sentence that says what is good."""
_ENDS = {"done": "done", "stopped": "stopped, can resume", "failed": "failed"}


def _chart(
    groups: Sequence[RunGroup],
    points: Callable[[ComparedRun], tuple[Sequence[float], Sequence[float]]],
    title: str,
    unit: str,
    note: str,
) -> str:
    lines: list[Curve] = []
    bands: list[SeedRange] = []
    for group in groups:
        known = [(x, y) for x, y in map(points, group.runs) if len(x)]
        if not known:
            continue
        if len(known) == 1:
            lines.append(Curve(*known[0], group.style, group.label, dots=len(known[0][0]) <= 40))
            continue
        x, low, mean, high = average(known)
        bands.append(SeedRange(x, low, high, group.style))
        lines.append(Curve(x, mean, group.style, f"{group.label} ({len(known)} seeds)"))
    return chart(lines, title, bands=bands, unit=unit, note=note)


def average(
    curves: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Positions that all curves reach, and there the lowest, mean and highest of them, each between its points in
    proportion."""
    begin, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    every = sorted({position for x, _ in curves for position in x if begin <= position <= end})
    positions = every[:: max(1, len(every) // POINTS)]
    if every and positions[-1] != every[-1]:
        positions.append(every[-1])
    rows = [[_between(x, y, position) for x, y in curves] for position in positions]
    return (
        positions,
        [min(row) for row in rows],
        [sum(row) / len(row) for row in rows],
        [max(row) for row in rows],
    )


def _between(x: Sequence[float], y: Sequence[float], position: float) -> float:
    index = min(max(bisect_right(x, position), 1), len(x) - 1)
    gap = x[index] - x[index - 1] if len(x) > 1 else 0.0
    return (
        y[index - 1] + (y[index] - y[index - 1]) * (position - x[index - 1]) / gap
        if gap > 0
        else y[index]
    )


def _ranking(runs: Sequence[ComparedRun], groups: Sequence[RunGroup], measure: str) -> str:
    """A table of the runs, the best first; those without an evaluation last."""
    labels = {run: group for group in groups for run in group.runs}
    order = sorted(runs, key=lambda run: run.best(measure) or (math.inf, 0))
    rows = ""
    for run in order:
        best = run.best(measure)
        scalars = run.history.scalars
        facts = run.record.facts
        group = labels[run]
        end = run.record.end
        cells = [
            ("number", "–" if best is None else f"{best[0]:.4f}"),
            ("number", "–" if best is None else str(best[1])),
            ("number", f"{last(scalars['loss']):.4f}"),
            ("number", quantity(last(scalars["tokens"]))),
            ("number", duration(run.seconds[-1]) if run.seconds else "–"),
            ("number", quantity(median(scalars["tokens_per_second"]))),
            ("number", quantity(facts.active_parameters)),
            ("number", _value(run, SEEDS[0])),
            ("", "running or killed" if end is None else _ENDS[end.reason]),
        ]
        name = f'<td>{_text(str(run.folder))}</td><td><span class="key {group.style}">{_text(group.label)}</span></td>'
        rows += f"<tr>{name}{''.join(_cell(kind, text) for kind, text in cells)}</tr>"
    best_of = "best bits per byte" if measure == "bits_per_byte" else "best validation loss"
    heads = (
        "run",
        "config",
        best_of,
        "at step",
        "training loss",
        "tokens",
        "time",
        "tokens a second",
    )
    return _table([*heads, "active parameters", "seed", "end"], rows)


def _differences(groups: Sequence[RunGroup], keys: Sequence[str]) -> str:
    """A row for each key that differs, a column for each config."""
    if not keys:
        return "<p>The configs differ in the seed and the folder alone.</p>"
    heads = ["key", *(group.label for group in groups)]
    rows = ""
    for key in keys:
        values = "".join(_cell("", _value(group.runs[0], key)) for group in groups)
        rows += f"<tr><th>{_text(key)}</th>{values}</tr>"
    return _table(heads, rows)


def _table(heads: Iterable[str], rows: str) -> str:
    first_row = "".join(f"<th>{_text(head)}</th>" for head in heads)
    return f'<div class="wide runs"><table><tr>{first_row}</tr>{rows}</table></div>'


def _cell(kind: str, text: str) -> str:
    return f'<td class="{kind}">{_text(text)}</td>' if kind else f"<td>{_text(text)}</td>"


def _text(text: str) -> str:
    return escape(printable(text))
