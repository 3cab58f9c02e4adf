"""Whole runs on a disk that fails: no step that was said to be saved is lost, no row is missing without a word, and the
status is true."""

import json
import re
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.faults.faulty_disk import FaultyDisk
from tests.train.tiny import recipe, run
from xscale.checkpoint.search import find_newest
from xscale.core.errors import EXIT_DONE, ConfigError, FaultError
from xscale.recipe import Recipe
from xscale.step.stepper import StepGradients, Stepper

STEPS = 200
SMALL = {
    "kind": "decoder",
    "width": 8,
    "stack": {"depth": 1, "block": {"mixer": {"kind": "attention", "heads": 2}, "ffn": {"kind": "dense", "hidden": 8}}},
}


class Tracker(types.ModuleType):
    """Stands for the package wandb; its service fails with the disk."""

    class Error(Exception):
        pass

    def __init__(self, disk: FaultyDisk, folder: Path) -> None:
        super().__init__("wandb")
        self.__spec__ = types.SimpleNamespace(name="wandb")  # type: ignore[assignment]
        self.steps: list[int] = []
        self._disk, self._path = disk, folder / "service"

    def _call(self) -> None:
        try:
            self._disk.touch("write", self._path)
        except OSError as error:
            raise self.Error(str(error)) from error

    def init(self, **_: Any) -> "Tracker":
        self._call()
        return self

    def log(self, row: dict[str, Any], step: int) -> None:
        self._call()
        if "loss" in row:
            self.steps.append(step)

    def finish(self, exit_code: int) -> None:
        pass


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of the runs, which is no part of them."""
    folder = tmp_path_factory.mktemp("prepared")
    run(small(folder, folder / "data", steps=1))
    return folder / "data"


def small(folder: Path, data: Path, steps: int = STEPS) -> Recipe:
    return recipe(
        folder,
        model=SMALL,
        train={"steps": steps, "batch_size": 2, "micro_batch_size": 2, "eval_every": 50, "eval_sequences": 2},
        checkpoint={"every_steps": 20, "keep_last": 2, "asynchronous": False, "failure_limit": 3},
        observe={"tensorboard": True, "report": True, "wandb": steps == STEPS, "progress": False},
        data={"folder": str(data), "sequence_length": 8},
    )


@pytest.fixture(scope="module")
def first_step_computed() -> Iterator[None]:
    """Compute the first step of each run; the others have its numbers, as no fault of a disk is in a computation."""
    compute, apply = Stepper.compute_gradients, Stepper.apply
    known: dict[int, StepGradients] = {}

    def computed(self: Stepper, *given: Any, **options: Any) -> StepGradients:
        if id(self) not in known:
            known.clear()
            known[id(self)] = compute(self, *given, **options)
            return known[id(self)]
        scalars = given[3] if len(given) > 3 else options.get("scalars", tuple)
        return replace(known[id(self)], sums=tuple(scalars()))

    def applied(self: Stepper, gradients: StepGradients, *given: Any) -> None:
        if gradients is known[id(self)]:
            apply(self, gradients, *given)

    with mock.patch.object(Stepper, "compute_gradients", computed), mock.patch.object(Stepper, "apply", applied):
        yield


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, each of which is whole."""
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def said_missing(text: str, what: str) -> int:
    """How many entries the last lines of a run say are missing."""
    numbers = re.findall(rf"(\d+) entr(?:y|ies) of {re.escape(what)}", text)
    return int(numbers[-1]) if numbers else 0


def drive(seed: int, folder: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """One run on a disk with the faults of `seed`, then another on one that works; how the first ended."""
    disk = FaultyDisk(folder / "run", seed, rate=[0.002, 0.01, 0.05][seed % 3])
    tracker = Tracker(disk, folder / "run")
    settings = small(folder, data)
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", tracker)
        with disk.installed():
            try:
                status, error = run(settings), ""
            except (FaultError, ConfigError) as failure:
                status, error = 2 if isinstance(failure, ConfigError) else 1, str(failure)
        said = "".join(capsys.readouterr()) + error
        assert status or not error
        # No step that was said to be saved is lost.
        saved = [int(step) for step in re.findall(r"^step (\d+): saved", said, re.MULTILINE)]
        newest = find_newest(folder / "run" / "checkpoints", hashes=True)
        assert not saved or (newest.step is not None and newest.step >= saved[-1]), (saved, newest)
        assert status or newest.step == STEPS
        # No row is missing without a word.
        trained = sorted({row["step"] for row in rows(folder / "run") if "loss" in row})
        steps = [row["step"] for row in rows(folder / "run") if "loss" in row]
        assert steps == trained, "in order, and each once"
        count = said_missing(said, "metrics.jsonl")
        if status == EXIT_DONE:
            assert count == 0
            assert steps == list(range(1, STEPS + 1))
            assert [row["step"] for row in rows(folder / "run") if "eval_loss" in row] == [50, 100, 150, 200]
            assert tracker.steps == steps
            assert (folder / "run" / "report.html").exists()
            assert "done at step" in (folder / "run" / "log.txt").read_text()
        elif steps and "the end of metrics.jsonl" not in said:
            # A checkpoint whose save failed in its last call is there all the same.
            last = max([*saved, *steps, newest.step or 0])
            # Rows of evaluations may be among those that are missing.
            assert STEPS - len(steps) <= count + (STEPS - last), (last, count, len(steps))
        # On a disk that works the same command ends the run.
        assert run(settings) == EXIT_DONE, capsys.readouterr()
        assert find_newest(folder / "run" / "checkpoints", hashes=True).step == STEPS
        ended = {row["step"] for row in rows(folder / "run") if "loss" in row}
        assert ended >= set(range((newest.step or 0) + 1, STEPS + 1))
    return f"status {status}" + (", rows missing" if count else "")


def seeds(first: int, last: int, *marks: Any) -> list[Any]:
    return [pytest.param(range(at, min(at + 10, last)), marks=marks, id=f"{at}-") for at in range(first, last, 10)]


@pytest.mark.long
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(range(3), id="0-"),
        *seeds(3, 33, pytest.mark.long),
        *seeds(33, 1000, pytest.mark.nightly),
    ],
)
def test_whole_runs_on_a_disk_that_fails(
    chosen: range,
    prepared: Path,
    first_step_computed: None,
    quick_path: Path,
    capsys: pytest.CaptureFixture[str],
    count_cases: Callable[[int, str], None],
    request: pytest.FixtureRequest,
) -> None:
    first = request.config.getoption("--disk-seed")
    for seed in range(chosen.start + first, chosen.stop + first):
        folder = quick_path / str(seed)
        folder.mkdir()
        try:
            ended = drive(seed, folder, prepared, capsys)
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
        count_cases(1, f"a run on a disk that fails: {ended}")
        shutil.rmtree(folder)
