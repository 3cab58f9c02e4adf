"""The files that `xscale bench gpu` leaves: results.json, rewritten after every row, logs.tgz, a profile and plots."""

import io
import os
import tarfile
from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Any

from xscale.core.files.file_safety import remove_file

FILE_BYTES = 16 * 2**20
"""Each file is smaller than this."""
FILES = 8
LOG_BYTES = 2**20
"""The end of each log that is kept."""
PLOTS = 5
PROFILE = "profile.json.gz"


class GpuResults:
    """The rows so far, and the file that always has all of them."""

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        self.folder = folder
        self.rows: list[dict[str, Any]] = []
        self.header = dict(header)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (
            "results.json",
            "logs.tgz",
            PROFILE,
            *(file.name for file in folder.glob("J*.png")),
        ):
            remove_file(folder, name)
        self.write()

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row and write the file."""
        self.rows.append(dict(row))
        self.write()

    def write(self) -> None:
        """Write results.json at once and whole: a reader, or a kill, never sees half of it."""
        lines = ",\n  ".join(dumps(row) for row in self.rows)
        head = dumps(self.header, indent=1)[:-2]
        partial = self.folder / ".results.json"
        partial.write_text(f'{head},\n "rows": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
        os.replace(partial, self.folder / "results.json")

    def pack(self, logs: Path) -> None:
        """Write the logs' ends into logs.tgz."""
        partial = self.folder / ".logs.tgz"
        with tarfile.open(partial, "w:gz") as archive:
            for log in sorted(logs.glob("*.log")):
                content = log.read_bytes()[-LOG_BYTES:]
                entry = tarfile.TarInfo(log.name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        os.replace(partial, self.folder / "logs.tgz")

    def plot(self) -> list[Path]:
        """Plot the jobs that have the most rows with figures, one PNG each."""
        rows_of_job: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows:
            if plotted_figure(row) is not None:
                rows_of_job.setdefault(row["job"], []).append(row)
        largest = sorted(rows_of_job, key=lambda job: -len(rows_of_job[job]))[:PLOTS]
        return [_plot(job, rows_of_job[job], self.folder, self.header) for job in sorted(largest)]

    def limit_sizes(self) -> list[str]:
        """Remove a profile that is too large; return what was removed."""
        profile = self.folder / PROFILE
        if profile.exists() and profile.stat().st_size >= FILE_BYTES:
            remove_file(self.folder, PROFILE)
            return [f"{PROFILE} was larger than {FILE_BYTES // 2**20} MiB and is left out"]
        return []


def plotted_figure(row: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the figure of a row that a plot shows, with its name: TFLOP/s before MFU, speeds before times."""
    for name in ("tflops", "mfu", "tokens_per_second", "of_ceiling", "milliseconds", "megabytes"):
        if isinstance(row.get(name), int | float):
            return name, float(row[name])
    return None


def _plot(
    job: str, rows: Sequence[Mapping[str, Any]], folder: Path, header: Mapping[str, Any]
) -> Path:
    """Plot bars, one for each row; rows of different figures stand in different panels."""
    from matplotlib.figure import Figure

    figures: dict[str, list[tuple[str, float]]] = {}
    for row in rows:
        name, value = plotted_figure(row) or ("", 0.0)
        figures.setdefault(name, []).append((f"{row['case']} · {row['side']}", value))
    longest = max(map(len, figures.values()))
    drawing = Figure(figsize=(9 * len(figures), 1.5 + 0.22 * longest), layout="constrained")
    for axes, (name, bars) in zip(
        drawing.subplots(1, len(figures), squeeze=False)[0], figures.items(), strict=True
    ):
        axes.barh(range(len(bars)), [value for _, value in bars])
        axes.set_yticks(range(len(bars)), [label[:70] for label, _ in bars], fontsize="x-small")
        axes.invert_yaxis()
        axes.set_xlabel(name)
    drawing.suptitle(f"{job} on {header.get('machine', {}).get('device', 'an unknown device')}")
    file = folder / f"{job}.png"
    drawing.savefig(file, dpi=80)
    return file
