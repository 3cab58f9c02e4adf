"""Run the checks of a family on parts: all of them for `xscale check-part`, the quick ones at the start of a run."""

import importlib
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xscale.conformance.check import Arguments, Check, checks_of
from xscale.conformance.families import FAMILIES, family_named
from xscale.core.errors import ConfigError, Problem
from xscale.core.foreign import reason
from xscale.core.registry import Entry

CORE = (
    "core",
    "core_added_terms",
    "core_context",
    "core_ones",
    "core_dropout",
    "core_prefix",
    "core_scores",
    "core_static",
    "core_running_stats",
    "core_extremes",
)
SUITES = {
    "model": ("model",),
    "mixer": ("attention.mixer", "attention.mixer_padding", "attention.mixer_extremes"),
    "core": tuple(f"attention.{name}" for name in CORE),
    "pattern": ("pattern",),
    "position": ("position",),
    "norm": ("block.norm",),
    "residual": ("block.residual",),
    "ffn": ("block.ffn",),
    "router": ("router",),
    "objective": ("objective",),
    "optimizer": ("optimizer",),
    "schedule": ("schedule",),
    "source": ("source",),
    "tokenizer": ("tokenizer",),
}
"""Family -> the modules of its checks."""


@dataclass(frozen=True)
class Verdict:
    """Result of a check of a part."""

    entry: Entry[Any]
    check: Check
    cases: int
    """How many cases passed."""
    reason: str | None
    """Why a case failed; None: all passed."""

    @property
    def part(self) -> str:
        """The part as messages call it: `core 'uniform'`."""
        return f"{self.check.family} '{self.entry.name}'"


def parts_of(modules: Iterable[str]) -> list[tuple[str, Entry[Any]]]:
    """Return the parts that modules, or modules below them, registered, each with its family."""
    prefixes = tuple(modules)
    return [
        (family, entry)
        for family in FAMILIES
        for entry in family_named(family)
        if any(
            entry.part.__module__ == name or entry.part.__module__.startswith(f"{name}.")
            for name in prefixes
        )
    ]


def checks_for(family: str) -> list[Check]:
    """Return all checks of a family's parts."""
    modules = [importlib.import_module(f"xscale.conformance.{name}") for name in SUITES[family]]
    return [check for module in modules for check in checks_of(module)]


def verdicts(family: str, entry: Entry[Any], *, at_start: bool = False) -> Iterator[Verdict]:
    """Hold a part against the checks that are for it; `at_start`: against the quick ones."""
    for check in checks_for(family):
        if not at_start or check.at_start:
            cases, failure = _passed(check, entry)
            if cases or failure is not None:
                yield Verdict(entry, check, cases, failure)


def broken_promises(modules: Iterable[str]) -> list[Problem]:
    """Return the first promise that each part of these modules breaks, by the quick checks."""
    problems = []
    for family, entry in parts_of(modules):
        if not __debug__:
            what = (
                f"{family} '{entry.name}' cannot be checked where Python leaves out assertions (-O)"
            )
            return [Problem("plugins", what, "Start Python without -O.")]
        broken = next(
            (verdict for verdict in verdicts(family, entry, at_start=True) if verdict.reason), None
        )
        if broken is not None:
            what = f"{broken.part} breaks a promise, {broken.check.sentence}: {broken.reason}"
            module = _typed_module(entry.part.__module__)
            fix = f"Mend {module}; `xscale check-part {module}` runs all checks."
            problems.append(Problem("plugins", what, fix))
    return problems


def _typed_module(name: str) -> str:
    """Return what `xscale check-part` takes for a module: its name if it is installed, else its file."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or "." in name or "site-packages" in file:
        return name
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _passed(check: Check, entry: Entry[Any]) -> tuple[int, str | None]:
    """The number of cases that pass, until one fails, and why that one does."""
    passed, case = 0, ""
    # The state of torch's generator is the caller's.
    with torch.random.fork_rng(devices=[]):
        try:
            for case, arguments in check.cases(entry):  # noqa: B007
                _call(check, arguments)
                passed += 1
        except (AssertionError, NotImplementedError, ConfigError) as error:
            return passed, _named(case, entry, _failure(error))
        except Exception as error:
            return passed, _named(
                case, entry, f"{type(error).__name__} at {_place(error)}: {reason(error)}"
            )
    return passed, None


def _named(case: str, entry: Entry[Any], failure: str) -> str:
    """The failure, with the case if it is one of several."""
    return f"{failure} ({case})" if case not in ("", entry.name) else failure


def _call(check: Check, arguments: Arguments) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check.run(arguments, Path(folder))


def _failure(error: Exception) -> str:
    """Why a check failed, as a clause."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, NotImplementedError):
        return f"the part does not define `{frame.name}`"
    if isinstance(error, ConfigError):
        return f"refused: {error}"
    return str(error) or f"`{(frame.line or '').removeprefix('assert ')}` does not hold"


def _place(error: Exception) -> str:
    """File and line where the error was raised, as far as it is not in torch."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
