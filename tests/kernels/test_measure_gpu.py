"""The script that measures on a GPU: its commands are valid, and failures and time limits are recorded."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from xscale.cli.bench import bench_app
from xscale.recipe import read
from xscale_kernels.bench.__main__ import parser
from xscale_kernels.select import operators

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_gpu", ROOT / "kernels/measure_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["measure_gpu"] = module
    spec.loader.exec_module(module)
    return module


def test_its_commands_are_valid(script: ModuleType, tmp_path: Path) -> None:
    steps = script.steps(tmp_path)
    assert {step.group for step in steps} == {"machine", "tests", "ops", "parts", "moe", "train", "checkpoint"}
    assert len({step.name for step in steps}) == len(steps)
    timed = {step.name.removeprefix("bench-") for step in steps if step.group == "ops"}
    assert set(operators()) == timed
    for step in steps:
        if step.group == "ops":
            parser().parse_args(list(step.command[4:]))
        if step.group in ("moe", "train"):
            # Typer parses the options before the help that ends it.
            assert CliRunner().invoke(bench_app, [*step.command[4:], "--help"]).exit_code == 0
        for file in [word for word in step.command if word.startswith("configs/")]:
            recipe, _ = read(ROOT / file, [word for word in step.command if "=" in word and not word.startswith("-")])
            assert recipe.check(1) == []
        for file in [word for word in step.command if word.startswith("tests")]:
            assert (ROOT / file).exists()


def test_it_fits_into_half_an_hour(script: ModuleType, tmp_path: Path) -> None:
    """Limits by time: tests run concurrently, and a typical operator takes a third of its limit."""
    steps = script.steps(tmp_path)
    tests = max(step.seconds for step in steps if step.group == "tests")
    ops = sum(step.seconds for step in steps if step.group == "ops") / 3
    rest = sum(step.seconds for step in steps if step.group not in ("tests", "ops")) / 2
    assert tests + ops + rest <= 30 * 60


def test_failures_are_recorded_and_other_steps_run(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def python(name: str, code: str, seconds: float = 20.0, **more: object) -> object:
        return script.GpuStep("some", name, (sys.executable, "-c", code), seconds, **more)

    steps = [
        python("failing", "print('why'); raise SystemExit(3)", concurrent=True),
        python("slow", "import time; time.sleep(60)", 1.0, concurrent=True),
        script.GpuStep("some", "absent", ("no-such-program",), 5.0),
        python("wrong", "print('{')", read=script.last_json),
        python("good", "print('noise'); print('{\"ms\": 2.5}')", read=script.last_json),
    ]
    monkeypatch.setattr(script, "steps", lambda folder: steps)
    assert script.main([str(tmp_path / "out")]) == 1
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert {name: one["status"] for name, one in summary.items()} == {
        "failing": "failed (3)",
        "slow": "timed out after 1 s",
        "absent": "failed (127)",
        "wrong": "failed (its output)",
        "good": "done",
    }
    assert summary["failing"]["said"] == "why\n"
    assert summary["good"]["found"] == {"ms": 2.5}
    assert script.main([str(tmp_path / "out"), "--only", "good"]) == 0
    assert set(json.loads((tmp_path / "out/summary.json").read_text())) == set(summary)
    capsys.readouterr()
    assert script.main([str(tmp_path / "out"), "--only", "bad"]) == 2
    assert "unknown step or group: bad" in capsys.readouterr().err
    assert script.main([str(tmp_path / "out"), "--list"]) == 0
    assert "no-such-program" in capsys.readouterr().out


def test_outputs_are_read(script: ModuleType) -> None:
    assert script.tested("x\n== 3 passed, 1 skipped in 2.0s ==\n") == "3 passed, 1 skipped in 2.0s"
    said = "step 30: saved /a/b (0.4 s)\nstep 60 could not be saved: disk; training continues\n"
    assert script.stalls(said) == {"stall": ["0.4 s"], "failed": ["could not be saved: disk; training continues"]}
