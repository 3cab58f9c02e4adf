"""What xscale is asked, with the stand-in and with xscale itself."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from xscale_launch import ask
from xscale_launch.errors import LaunchError

ROOT = Path(__file__).parents[2]
FAKE = (sys.executable, str(ROOT / "tests/launch/fake_train.py"))
QUICKSTART = ROOT / "configs/run/quickstart.yaml"


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("run:\n  dir: runs/x  # here\n  seed: 0\n", "runs/x"),
        ("run:   # default\n  seed: 0\n  dir: '/a b/c'\nmodel:\n  dir: no\n", "'/a b/c'"),
        ("run:\n  dir: /a b/c#1   # command line\n", "/a b/c#1"),
        ("model:\n  dir: no\nrun:\n  seed: 1\n  dir: yes\n", "yes"),
    ],
)
def test_the_run_folder_is_found_in_the_config(text: str, folder: str) -> None:
    found = ask.RUN_DIR.search(text)
    assert found is not None
    assert found["dir"] == folder


def test_a_folder_called_dir_elsewhere_is_not_it() -> None:
    assert ask.RUN_DIR.search("run:\n  seed: 0\nmodel:\n  dir: no\n") is None


def test_an_answer(tmp_path: Path) -> None:
    config = tmp_path / "x.yaml"
    config.write_text("train.steps: 3\n")
    plan = ask.plan(FAKE, config, ["run.dir=runs/x", "fake.gigabytes=8"], 4, os.environ)
    assert plan.run_dir == Path.cwd() / "runs/x"
    assert "train.steps: 3" in plan.config
    assert plan.gigabytes == 2.0


def test_refusals_and_failures_come_with_xscales_words(tmp_path: Path) -> None:
    config = tmp_path / "x.yaml"
    config.write_text("")
    with pytest.raises(LaunchError, match="3 does not divide 4 processes"):
        ask.plan(FAKE, config, ["fake.divides=3"], 4, os.environ)
    with pytest.raises(LaunchError, match="failed with status 1"):
        ask.plan((sys.executable, "-c", "raise OSError('no disk')"), config, [], 4, os.environ)
    with pytest.raises(LaunchError, match=r"shows no run\.dir"):
        ask.plan((sys.executable, "-c", "print('{}')"), config, [], 4, os.environ)
    with pytest.raises(LaunchError, match="cannot be started"):
        ask.plan(("/nowhere/xscale",), config, [], 4, os.environ)


@pytest.mark.slow
def test_xscale_itself_keeps_the_contract(tmp_path: Path) -> None:
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'launch'}"}
    plan = ask.plan(ask.xscale(None), QUICKSTART, [f"run.dir={tmp_path / 'a b'}"], 2, variables)
    assert plan.run_dir == tmp_path / "a b"
    assert plan.gigabytes > 0
    with pytest.raises(LaunchError, match="does not divide the 2 ranks"):
        ask.plan(ask.xscale(None), QUICKSTART, ["parallel.mesh.tp=3"], 2, variables)


def test_the_command_of_xscale() -> None:
    assert ask.xscale(None) == (sys.executable, "-m", "xscale.cli")
    assert ask.xscale(None, "python3") == ("python3", "-m", "xscale.cli")
    assert ask.xscale(shlex.join(FAKE)) == FAKE
