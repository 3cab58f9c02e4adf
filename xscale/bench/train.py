"""Benchmark of a training step against plain PyTorch and transformers, and against the dense twin of an MoE."""

import gc
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from xscale.bench.harness.timing import Timings, alternate, host_clock
from xscale.bench.train_sides import XSCALE, SideBuilder, TrainingSide, training_sides, xscale_side
from xscale.core.errors import ConfigError, nearest
from xscale.mesh.environment import read_rank_info
from xscale.mesh.mesh import leave_process_group
from xscale.run.parts import device_of
from xscale.settings.settings import Settings

GPU_WARMUP = 3
"""Steps before the timed ones on a GPU: the first compiles, the second may compile once more."""


def bench_train(
    settings: Settings, steps: int, names: Sequence[str] = (), *, profile: Path | None = None
) -> dict[str, Any]:
    """Time training steps of the sides of these names, all by default.

    On a CPU the sides alternate, and a ratio is the median over pairs of steps. On a GPU one side after another is
    built, timed and freed, so that each has all of the memory. `profile`: a file for a trace of two steps of xscale.
    """
    builders = training_sides(settings)
    if unknown := [name for name in names if name not in builders]:
        raise ConfigError(
            "--side", f"there is no side '{unknown[0]}'", nearest(unknown[0], list(builders))
        )
    chosen = {name: builders[name] for name in names or builders}
    device = device_of(settings, read_rank_info())
    if device.type == "cpu":
        return _time_in_turns(chosen, steps, device)
    rows: list[dict[str, Any]] = []
    for name, build in chosen.items():
        try:
            rows.append(measure_side(build, steps, profile if name == XSCALE else None))
        except (ConfigError, RuntimeError) as error:
            rows.append({"name": name, "reason": " ".join(str(error).split())[:200]})
    return {
        "rows": rows,
        "tokens_per_second_ratios": _ratios(rows),
        "steps": steps,
        "device": str(device),
    }


def _time_in_turns(
    builders: Mapping[str, SideBuilder], steps: int, device: torch.device
) -> dict[str, Any]:
    sides, rows, errors = [], [], []
    try:
        for name, build in builders.items():
            try:
                sides.append(build(steps + 1))
            except ConfigError as error:
                rows.append({"name": name, "reason": str(error)})
                errors.append(error)
        if not sides:
            raise errors[0]
        timings = time_steps(sides, steps)
    finally:
        leave_process_group()
    rows = [side.row(timings) for side in sides] + rows
    first, *baselines = sides
    ratios = {
        f"{first.name} / {other.name}": speed_ratio(timings, first, other) for other in baselines
    }
    return {"rows": rows, "tokens_per_second_ratios": ratios, "steps": steps, "device": str(device)}


def _ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    speeds = {row["name"]: row["tokens_per_second"] for row in rows if "tokens_per_second" in row}
    if XSCALE not in speeds:
        return {}
    return {
        f"{XSCALE} / {name}": speeds[XSCALE] / speed
        for name, speed in speeds.items()
        if name != XSCALE
    }


def measure_side(build: SideBuilder, steps: int, profile: Path | None = None) -> dict[str, Any]:
    """Build one side, time its steps, and free it; the row has the peak of its memory too."""
    side = None
    try:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        side = build(steps + GPU_WARMUP + 2)
        timings = time_steps([side], steps, GPU_WARMUP)
        if profile is not None:
            _write_profile(side, steps + GPU_WARMUP, profile)
        peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None
        return side.row(timings) | {"megabytes": peak}
    finally:
        del side
        leave_process_group()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _write_profile(side: TrainingSide, first: int, file: Path) -> None:
    """Write a trace of two steps, for chrome://tracing or Perfetto; gzipped where the name ends so."""
    from torch.profiler import profile

    with profile() as trace:
        for number in (first, first + 1):
            side.step(number)
    trace.export_chrome_trace(str(file))


@dataclass(frozen=True)
class TrainingSpeed:
    """Training speed of one variant: medians of steps that alternate with those of the other variants."""

    tokens_per_second: float
    tokens_per_processor_second: float | None
    """Tokens per second of CPU time; None on a GPU."""


def training_speeds(variants: Mapping[str, Settings], steps: int) -> dict[str, TrainingSpeed]:
    """Time `steps` training steps of each variant."""
    sides = []
    try:
        for name, settings in variants.items():
            sides.append(xscale_side(name, settings, steps + 1))
        timings = time_steps(sides, steps)
    finally:
        leave_process_group()
    on_cpu = all(
        device_of(settings, read_rank_info()).type == "cpu" for settings in variants.values()
    )
    return {
        side.name: TrainingSpeed(
            side.tokens / timings.median(side.name),
            side.tokens / timings.median(side.name, "processor_seconds") if on_cpu else None,
        )
        for side in sides
    }


def time_steps(sides: Sequence[TrainingSide], steps: int, warmup: int = 1) -> Timings:
    """Time one step of each side in turn, `steps` times after `warmup` steps."""
    numbered = {side.name: partial(_next_step, side, itertools.count()) for side in sides}
    return alternate(numbered, host_clock(), steps, warmup=warmup)


def _next_step(side: TrainingSide, numbers: Iterator[int]) -> dict[str, float]:
    return side.step(next(numbers))


def speed_ratio(timings: Timings, side: TrainingSide, other: TrainingSide) -> float:
    """Tokens per second of `side` over those of `other`: the median over the pairs of steps of one round."""
    return side.tokens / other.tokens * timings.ratio(other.name, side.name)


def format_result(result: dict[str, Any]) -> str:
    """Format the result of `bench_train` as text: one line per side, then the ratios."""
    lines: list[str] = []
    for row in result["rows"]:
        if "reason" in row:
            lines.append(f"{row['name']:<16} not measured: {row['reason']}")
            continue
        mfu = "" if row["mfu"] is None else f"  MFU {row['mfu']:.1%} (6N: {row['mfu_6n']:.1%})"
        split = "  ".join(f"{phase} {seconds:.3f}s" for phase, seconds in row["split"].items())
        memory = f"  {row['megabytes']:,.0f} MB" if row.get("megabytes") else ""
        busiest = f"  busiest expert {row['overload']:.2f}x" if row["overload"] else ""
        speed = f"{row['tokens_per_second']:>10,.0f} tokens/s{mfu}  {row['step_seconds']:.3f} s per step"
        lines.append(f"{row['name']:<16} {speed}{memory}{busiest}")
        if split:
            lines.append(f"{'':<16} {split}")
    for name, value in result["tokens_per_second_ratios"].items():
        side, _, baseline = name.partition(" / ")
        lines.append(f"{side} runs at {value:.3f}x of {baseline} (tokens/s)")
    return "\n".join(lines)
