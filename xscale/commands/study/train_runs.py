"""Train several runs of a config one after another, each in a process of its own, without those that are finished."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from xscale.core.config import encode
from xscale.core.errors import ConfigError, FaultError, Problem
from xscale.core.files.file_safety import decode_json
from xscale.core.files.run_files import open_run_file, read_run_file
from xscale.observe.metrics import METRICS_FILE
from xscale.recipe import Recipe, read
from xscale.run.config_changes import differences, flatten, lookup, one_line, with_defaults
from xscale.run.run_folder import read_config

SECTIONS = ("model", "objective", "optimizer", "schedule", "train", "precision")
"""Sections on which the result of a run depends, with others whose changes no run resumes from."""


@dataclass(frozen=True)
class NamedRun:
    """A run of a config with overrides, in a folder."""

    name: str
    """How messages call it."""
    config: str
    overrides: tuple[str, ...]
    folder: Path
    seed: int
    recipe: Recipe
    """Without the folder and the seed."""


def read_named(name: str, config: Path, overrides: Sequence[str]) -> Recipe:
    """Read a recipe whose problems have the name of its run. ConfigError with all of them."""
    try:
        recipe = read(config, list(overrides))[0]
    except ConfigError as error:
        raise ConfigError(_named(name, error.problems)) from None
    if problems := recipe.check():
        raise ConfigError(_named(name, problems))
    return recipe


def _named(name: str, problems: Sequence[Problem]) -> list[Problem]:
    return [replace(problem, path=f"{name}: {problem.path}") for problem in problems]


def check_unchanged(run: NamedRun, fix: str) -> None:
    """Raise ConfigError where the folder has a run of another config.

    A run may resume with another learning rate, but its result is then no result of this config.
    """
    config = read_config(run.folder)
    if config is None:
        return
    section = run.recipe.run.model_copy(update={"dir": str(run.folder), "seed": run.seed})
    before, now = with_defaults(config), encode(run.recipe.model_copy(update={"run": section}))
    changed = [difference for _, difference in differences(before, now)]
    for name in SECTIONS:
        old, new = (flatten(lookup(data, name), name) for data in (before, now))
        changed += [
            f"{key} was {one_line(old.get(key))} and is now {one_line(new.get(key))}"
            for key in dict.fromkeys((*old, *new))
            if old.get(key) != new.get(key)
        ]
    if changed:
        what = "this run has another config:"
        raise ConfigError(
            [Problem(str(run.folder), f"{what} {text}", fix) for text in dict.fromkeys(changed)]
        )


def train_unless_finished(run: NamedRun, say: Callable[[str], None]) -> None:
    """Train a run, or resume it. FaultError where training fails."""
    if last_evaluation(run.folder, run.recipe.train.steps) is not None:
        return
    say(f"{run.name}: training in {run.folder}")
    overrides = [*run.overrides, f"run.dir={json.dumps(str(run.folder))}", f"run.seed={run.seed}"]
    # A separate process, so that no run inherits another one's memory.
    command = [
        sys.executable,
        "-m",
        "xscale",
        "train",
        run.config,
        *overrides,
        "observe.progress=false",
    ]
    run.folder.mkdir(parents=True, exist_ok=True)
    with open_run_file(run.folder / "output.txt", "ab") as output:
        status = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    if status:
        raise FaultError(
            f"{run.name}: training failed with exit status {status}; see {run.folder / 'output.txt'}"
        )


def last_evaluation(folder: Path, steps: int) -> float | None:
    """Return the validation loss after the last step, NaN where it is not finite; None: the run is not finished."""
    file = folder / METRICS_FILE
    if not file.is_file():
        return None
    try:
        for line in map(decode_json, read_run_file(file, None).splitlines()):
            if line["step"] == steps and "eval_loss" in line:
                return float("nan") if line["eval_loss"] is None else float(line["eval_loss"])
    except (OSError, ValueError, TypeError, KeyError):
        # A line that is cut short, by a full disk or a kill, is no end of a run.
        return None
    return None
