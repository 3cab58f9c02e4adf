"""Plots of a benchmark: time, memory and fraction of the device's ceiling, against each axis that its cases vary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from xscale.bench.operators.report import BenchmarkRow

PANELS = (("milliseconds", "ms"), ("megabytes", "MB"), ("of_ceiling", "fraction of the ceiling"))


def axes_of(rows: Sequence[BenchmarkRow]) -> list[str]:
    """Names of the axes that the cases vary; ["case"] if no number varies."""
    names = dict.fromkeys(name for row in rows for name in row.at)
    varied = [name for name in names if len({row.at[name] for row in rows if name in row.at}) > 1]
    return varied or ["case"]


def plot(rows: Sequence[BenchmarkRow], folder: Path, device: str) -> list[Path]:
    """Write one PNG for each axis; return the files."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    implementations = list(dict.fromkeys(row.way for row in rows if row.milliseconds is not None))
    cases = list(dict.fromkeys(row.case for row in rows))
    for axis in axes_of(rows):
        figure = Figure(figsize=(12, 3.6), layout="constrained")
        for panel, (field, unit) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
            for way in implementations:
                measured = [
                    row for row in rows if row.way == way and getattr(row, field) is not None
                ]
                points = sorted(
                    (row.at.get(axis, cases.index(row.case)), getattr(row, field))
                    for row in measured
                )
                panel.plot(*zip(*points, strict=True), marker="o", label=way) if points else None
            panel.set_xlabel(axis)
            panel.set_ylabel(unit)
            panel.grid(alpha=0.3)
            if axis == "case":
                panel.set_xticks(range(len(cases)), [str(at) for at in range(1, len(cases) + 1)])
            elif min(row.at[axis] for row in rows if axis in row.at) > 0:
                panel.set_xscale("log", base=2)
            if field != "of_ceiling":
                panel.set_yscale("log")
        figure.axes[0].legend(fontsize="small")
        figure.suptitle(f"{rows[0].operator} on {device}, forward and backward")
        file = folder / f"{rows[0].operator}-{device.lower().replace(' ', '-')}-{axis}.png"
        figure.savefig(file, dpi=110)
        files.append(file)
    return files
