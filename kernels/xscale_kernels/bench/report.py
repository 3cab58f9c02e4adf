"""Runs an operator's tests, then its benchmark; prints no time where a test is red."""

from __future__ import annotations

import datetime
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType

import torch

from xscale_kernels.bench.case import Case
from xscale_kernels.bench.measure import ceilings, milliseconds, peak_bytes
from xscale_kernels.operators import operators
from xscale_kernels.select import UnusableError

ROOT = Path(__file__).parents[3]


BASELINES = {"eager", "torch", "apex", "sdpa", "flex"}
"""What may be asked of any operator; where a case has none of those asked for, eager stands in."""


class NotGreenError(RuntimeError):
    """The operator's tests fail or are not there, so its speed says nothing."""


@dataclass(frozen=True)
class Row:
    """One way through one case."""

    operator: str
    case: str
    way: str
    milliseconds: float | None
    """One forward and backward; None where this way refused."""
    against: str
    """The baseline's name."""
    speedup: float | None
    """The baseline's time over this one's."""
    megabytes: float | None
    """How far memory rose during the call."""
    of_ceiling: float | None
    """The least possible time (work over this device's measured rates) over the measured one."""
    refused: str = ""
    """Why there is no number."""
    at: Mapping[str, float] = field(default_factory=dict)
    """Where the case stands on the axes of plots."""
    says: str = ""
    """What this way computes, where its name could be taken for something else."""


def gate(operator: str) -> None:
    """Runs the operator's own tests and what the suite of all operators says of it. Raises NotGreenError when red."""
    folder = ROOT / "tests/kernels"
    own = [folder / f"{name}.py" for name in _bench(operator).TESTS]
    suites = [folder / "test_conformance.py"]
    if torch.cuda.is_available():
        suites += [folder / "test_on_gpu.py", folder / "triton/test_conformance.py"]
        own += [folder / "triton" / file.name for file in own if (folder / "triton" / file.name).exists()]
    absent = [file for file in (*suites, *own) if not file.exists()]
    if absent:
        raise NotGreenError(f"the tests of {operator} are not here ({absent[0]}); run in a checkout of the repository")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    words = f"[{operator}- or [{operator}]"
    for files, selection in ((suites, ["-k", words]), (own, [])):
        if not files:
            continue
        done = subprocess.run(
            [*command, *selection, *map(str, files)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise NotGreenError(f"the tests of {operator} are red:\n{done.stdout[-2000:]}")


def _bench(operator: str) -> ModuleType:
    if operator not in operators():
        raise ValueError(f"there is no operator '{operator}'; there are: {', '.join(operators())}")
    return importlib.import_module(f"xscale_kernels.{operator}.bench")


def _rows(operator: str, case: Case, device: str, against: str, limits: tuple[float, float]) -> list[Row]:
    able: dict[str, Callable[[], object]] = {}
    memory: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, way in case.ways.items():
        try:
            memory[name] = peak_bytes(way, device) / 2**20
            able[name] = way
        except UnusableError as reason:
            refused[name] = str(reason).partition(": ")[2]
    times = milliseconds(able, device)
    least = max(case.flops / limits[0], case.bytes / limits[1]) * 1e3
    base = times.get(against)
    return [
        Row(
            operator,
            case.label,
            name,
            times[name],
            against,
            base and base / times[name],
            memory[name],
            least / times[name] if least else None,
            at=case.at,
            says=case.says.get(name, ""),
        )
        if name in times
        else Row(operator, case.label, name, None, against, None, None, None, refused[name], case.at)
        for name in case.ways
    ]


def run(operator: str, device: str = "cpu", against: Sequence[str] = ("eager",)) -> list[Row]:
    """Times every way through every case of `operator`, forward and backward, after its tests.

    against: baselines, the first of which speed-ups are given over; where it is not a way of a case, "eager" stands in.
    Raises NotGreenError where the tests are red, ValueError for an unknown operator or baseline.
    """
    bench = _bench(operator)
    cases: list[Case] = bench.cases(device)
    ways = {name for case in cases for name in case.ways} | BASELINES
    if wrong := [name for name in against if name not in ways]:
        raise ValueError(f"{operator} is not measured against '{wrong[0]}'; there are: {', '.join(sorted(ways))}")
    gate(operator)
    limits = ceilings(device, torch.bfloat16 if device == "cuda" else torch.float32)
    rows: list[Row] = []
    for case in cases:
        base = next((name for name in against if name in case.ways), "eager")
        rows += _rows(operator, case, device, base, limits)
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as text, one line each, and what the ways are that say so."""
    lines = [f"{'case':44} {'way':10} {'ms':>10} {'speed-up':>9} {'MB':>9} {'of ceiling':>10}"]
    for row in rows:
        if row.milliseconds is None:
            lines.append(f"{row.case:44} {row.way:10} {row.refused}")
            continue
        speedup = f"{row.speedup:.2f}x" if row.speedup else "-"
        ceiling = f"{row.of_ceiling:.0%}" if row.of_ceiling else "-"
        lines.append(
            f"{row.case:44} {row.way:10} {row.milliseconds:10.3f} {speedup:>9} {row.megabytes or 0:9.1f} {ceiling:>10}"
        )
    lines += [f"{way}: {what}" for way, what in {row.way: row.says for row in rows if row.says}.items()]
    return "\n".join(lines)


def name_of(device: str) -> str:
    """What the device is called in files."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def version(package: str) -> str | None:
    """What is installed of a package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def record(rows: Sequence[Row], device: str, folder: Path = ROOT / "kernels/results") -> Path:
    """Writes the rows with device, versions, commit and date; returns the file."""
    name = name_of(device)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    date = datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d")
    found = {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "commit": commit,
        "date": date,
        "rows": [asdict(row) for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{rows[0].operator}-{name.lower().replace(' ', '-')}-{date}.json"
    file.write_text(json.dumps(found, indent=1) + "\n")
    return file
