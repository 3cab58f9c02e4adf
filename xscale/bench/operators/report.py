"""Runs an operator's tests, then its benchmark; a failing test ends it before anything is timed."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType

import torch

from xscale.bench.harness.machine import ROOT, describe_machine, version
from xscale.bench.harness.timing import ceilings, milliseconds_of, peak_bytes, time_calls
from xscale.core.errors import ConfigError, nearest
from xscale_kernels.cases import Case, ForwardBackward
from xscale_kernels.select import UnusableError, implementations, operators

BASELINES = {"eager", "torch", "apex", "sdpa", "flex"}
"""Baselines that every operator accepts; "eager" replaces one that a case lacks."""


class FailedTestsError(RuntimeError):
    """The operator's tests fail or are missing, so it is not benchmarked."""


@dataclass(frozen=True)
class BenchmarkRow:
    """One implementation in one case."""

    operator: str
    case: str
    way: str
    milliseconds: float | None
    """Forward and backward; None if the implementation refused."""
    against: str
    """The baseline's name."""
    speedup: float | None
    """The baseline's time over this implementation's."""
    megabytes: float | None
    """Peak memory of the call above what was allocated before."""
    of_ceiling: float | None
    """Lower bound of the time (work over this device's measured rates) over the measured time."""
    refused: str = ""
    """Reason of the refusal."""
    at: Mapping[str, float] = field(default_factory=dict)
    """Coordinates on the axes of the plots."""
    says: str = ""
    """The computation, where the implementation's name alone would mislead."""
    fastest: float | None = None
    """Shortest time, in milliseconds."""
    tflops: float | None = None
    """10^12 FLOP/s; None for an operator whose case counts no FLOPs."""


def require_passing_tests(operator: str) -> None:
    """Run the operator's own tests and its share of the conformance suite. Raises FailedTestsError."""
    folder = ROOT / "tests/kernels"
    operator_tests = [folder / f"{name}.py" for name in _bench(operator).TESTS]
    suites = [folder / "test_conformance.py"]
    if torch.cuda.is_available():
        suites += [folder / "test_on_gpu.py", folder / "triton/test_conformance.py"]
        operator_tests += [
            folder / "triton" / file.name
            for file in operator_tests
            if (folder / "triton" / file.name).exists()
        ]
    missing = [file for file in (*suites, *operator_tests) if not file.exists()]
    if missing:
        raise FailedTestsError(
            f"the tests of {operator} are missing ({missing[0]}); run in a checkout of the repository"
        )
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    expression = f"[{operator}- or [{operator}]"
    for files, selection in ((suites, ["-k", expression]), (operator_tests, [])):
        if not files:
            continue
        completed = subprocess.run(
            [*command, *selection, *map(str, files)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if completed.returncode != 0:
            raise FailedTestsError(
                f"tests of {operator} failed; not benchmarking:\n{completed.stdout[-2000:]}"
            )


def _bench(operator: str) -> ModuleType:
    if operator not in operators():
        raise ConfigError(
            "OPERATOR", f"there is no operator '{operator}'", nearest(operator, operators())
        )
    return importlib.import_module(f"xscale_kernels.{operator}.cases")


def with_compiled(case: Case) -> Case:
    """Add the definition under torch.compile, "compile", where "eager" is the operator's definition."""
    eager = case.ways.get("eager")
    if not isinstance(eager, ForwardBackward) or "eager" in case.says:
        return case
    compiled = ForwardBackward(torch.compile(eager.function, dynamic=False), eager.inputs)
    return replace(case, ways={"eager": eager, "compile": compiled, **case.ways})


def failure(error: Exception) -> str:
    """Format why an implementation has no time; a refusal without the operator's name."""
    if isinstance(error, UnusableError):
        return str(error).partition(": ")[2]
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def measure_case(
    operator: str,
    case: Case,
    device: str,
    against: str,
    limits: tuple[float, float],
    seconds: float = 1.0,
    begin: Callable[[str], bool] = lambda way: True,
) -> list[BenchmarkRow]:
    """Time every implementation of one case, forward and backward.

    against: the baseline. limits: FLOP/s and bytes/s of the device. seconds: about the time of each implementation.
    begin: called before an implementation runs first; if it returns False, this one is left out. An implementation
    that refuses, fails or runs out of memory costs its own row.
    """
    usable: dict[str, Callable[[], object]] = {}
    memory: dict[str, float] = {}
    failures: dict[str, str] = {}
    for name, way in case.ways.items():
        if not begin(name):
            continue
        try:
            # Before the memory is measured: compilers and autotuning allocate too.
            way()
            memory[name] = peak_bytes(way, device) / 2**20
            usable[name] = way
        except Exception as error:
            failures[name] = failure(error)
            error.__traceback__ = None
    timings = time_calls(usable, device, seconds)
    times = {name: milliseconds_of(timings, name, device) for name in usable}
    bound = max(case.flops / limits[0], case.bytes / limits[1]) * 1e3
    base = times.get(against)
    rows = []
    for name in case.ways:
        if name in times:
            says, rate = case.says.get(name, ""), bound / times[name] if bound else None
            speedup = base and base / times[name]
            row = BenchmarkRow(
                operator, case.label, name, times[name], against, speedup, memory[name], rate
            )
            tflops, fastest = case.flops / times[name] / 1e9 or None, timings.fastest(name) * 1e3
            rows.append(replace(row, at=case.at, says=says, tflops=tflops, fastest=fastest))
        elif name in failures:
            row = BenchmarkRow(
                operator, case.label, name, None, against, None, None, None, failures[name], case.at
            )
            rows.append(row)
    return rows


def check_baselines(operator: str, against: Sequence[str]) -> None:
    """Raise ConfigError for a baseline that the operator has not."""
    names = {entry.name for entry in implementations(operator)} | BASELINES
    if unknown := [name for name in against if name not in names]:
        what = f"{operator} is not measured against '{unknown[0]}'"
        raise ConfigError(
            "--against", what, f"There are: {', '.join(sorted(names - {'reference'}))}."
        )


def run(
    operator: str, device: str = "cpu", against: Sequence[str] = ("eager",)
) -> list[BenchmarkRow]:
    """Time every implementation in every case of `operator`, forward and backward, after its tests.

    against: baselines; speed-ups are over the first, or over "eager" in cases that lack it. On a GPU the definition
    under torch.compile runs too.
    Raises FailedTestsError if the tests fail, ConfigError for an unknown operator or baseline.
    """
    bench = _bench(operator)
    check_baselines(operator, against)
    require_passing_tests(operator)
    limits = ceilings(device, torch.bfloat16 if device == "cuda" else torch.float32)
    rows: list[BenchmarkRow] = []
    # One case after another is made, so that only one has memory.
    for case in bench.cases(device):
        base = next((name for name in against if name in case.ways), "eager")
        rows += measure_case(
            operator, with_compiled(case) if device == "cuda" else case, device, base, limits
        )
    return rows


def table(rows: Sequence[BenchmarkRow]) -> str:
    """Format the rows as text, one line each, then the notes on implementations."""
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
    lines += [
        f"{way}: {note}" for way, note in {row.way: row.says for row in rows if row.says}.items()
    ]
    return "\n".join(lines)


def name_of(device: str) -> str:
    """Name of the device in file names and tables."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def record(rows: Sequence[BenchmarkRow], device: str, folder: Path) -> Path:
    """Write the rows with device, versions, commit and date to JSON; return the file."""
    name = name_of(device)
    machine = describe_machine(torch.device(device))
    versions = {"triton": version("triton"), "cuda": torch.version.cuda}
    contents = {
        **machine,
        "device": name,
        "threads": torch.get_num_threads(),
        **versions,
        "rows": [asdict(row) for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{rows[0].operator}-{name.lower().replace(' ', '-')}-{machine['date']}.json"
    file.write_text(json.dumps(contents, indent=1) + "\n")
    return file
