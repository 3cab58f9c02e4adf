"""`xscale bench start`: phases add up to the time until the first step, and a killed run is timed to its next step."""

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.cli.test_every_command import SMALL, type_command
from xscale.bench.start.bench_start import PHASES, Start, show
from xscale.bench.start.worker import STEP, TIMED, StartClock, _holder
from xscale.cli.main import app
from xscale.core.errors import ConfigError
from xscale.mesh.environment import rank_environment


def test_phases_add_up_to_the_time_until_the_first_step(tmp_path: Path) -> None:
    clock = StartClock(time.time() - 10)
    clock.imported()
    model = clock.timed(lambda: time.sleep(0.02), "model")
    step = clock.step(lambda: time.sleep(0.01), tmp_path / "phases.json")
    model(), model(), step()
    assert not (tmp_path / "phases.json").exists()
    step()
    seconds = json.loads((tmp_path / "phases.json").read_text(encoding="utf-8"))
    assert seconds["imports"] >= 10
    assert seconds["model"] >= 0.04
    assert sum(seconds.get(phase, 0.0) for phase in PHASES[:-1]) == pytest.approx(seconds["total"])


def test_what_is_timed_is_there() -> None:
    """A run calls each of these by this name; a renamed one would end the benchmark."""
    for name in (*TIMED, STEP):
        holder, attribute = _holder(name)
        assert callable(getattr(holder, attribute)), name


@pytest.mark.parametrize(("compiles", "expected"), [(True, 3.0), (False, 0.0)])
def test_compilation_is_what_the_first_step_takes_longer(compiles: bool, expected: float) -> None:
    start = Start("first", {"first step": 4.0, "second step": 1.0, "total": 5.0}, compiles)
    assert start.compile_seconds == expected
    assert ("compile" in show([start])) is compiles


@pytest.mark.parametrize(("world", "expected"), [(1, None), (2, "1")])
def test_a_process_alone_has_no_rank(world: int, expected: str | None) -> None:
    assert rank_environment(1, world, 29500).get("RANK") == expected


def test_a_recipe_that_is_refused_starts_nothing() -> None:
    result = CliRunner().invoke(app, ["bench", "start", "bytes", "--processes", "3"])
    assert isinstance(result.exception, ConfigError)
    assert "does not divide" in str(result.exception)


@pytest.mark.long
def test_a_rank_that_ends_early_says_why(tmp_path: Path) -> None:
    done = type_command(["bench", "start", "bytes", *SMALL, "init.from=nowhere"], tmp_path)
    assert done.returncode == 2, done.stderr
    assert "rank 0 ended with status 2 before its second step" in done.stderr
    assert "nowhere" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_starts_are_timed(processes: int, tmp_path: Path) -> None:
    words = ["bench", "start", "bytes", *SMALL, "--processes", str(processes), "--json", "--record", "starts.json"]
    done = type_command(words, tmp_path)
    assert done.returncode == 0, done.stderr
    starts = json.loads(done.stdout)
    assert [start["name"] for start in starts] == ["first", "prepared", "killed"]
    for start in starts:
        assert start["seconds"]["total"] >= start["seconds"]["imports"] > 0
    assert starts[2]["seconds"]["checkpoint"] > starts[1]["seconds"]["checkpoint"]
    assert (starts[1]["seconds"]["rendezvous"] > 0.01) is (processes > 1)
    assert json.loads((tmp_path / "starts.json").read_text(encoding="utf-8")) == starts
    assert [path.name for path in tmp_path.iterdir()] == ["starts.json"]
