"""Questions of the launcher to xscale, with the stand-in and with xscale itself."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from xscale_launch.plans import plan_query
from xscale_launch.status import LaunchError

ROOT = Path(__file__).parents[2]
FAKE = (sys.executable, str(ROOT / "tests/launch/fake_train.py"))
QUICKSTART = ROOT / "configs/run/quickstart.yaml"


def test_an_answer(tmp_path: Path) -> None:
    config = tmp_path / "x.yaml"
    config.write_text("train.steps: 3\n")
    plan = plan_query.query_plan(FAKE, config, ["run.dir=runs/x", "fake.gigabytes=8"], 4, os.environ)
    assert plan.run_dir == Path.cwd() / "runs/x"
    assert "train.steps: 3" in plan.config
    assert plan.problems == []
    assert plan_query.query_run_dir(FAKE, config, ["run.dir=runs/x"], os.environ) == plan.run_dir


def test_what_does_not_fit_is_said_in_plans_words(tmp_path: Path) -> None:
    config = tmp_path / "x.yaml"
    config.write_text("")
    plan = plan_query.query_plan(FAKE, config, ["fake.gigabytes=180"], 2, os.environ, gpu=("--memory", "80"))
    (problem,) = plan.problems
    assert problem == "parallel: rank 0 needs 90.00 GB at its peak, and one GPU has 80.0 GB. Take more devices."
    assert (
        plan_query.query_plan(FAKE, config, ["fake.gigabytes=180"], 3, os.environ, gpu=("--memory", "80")).problems
        == []
    )


def test_refusals_and_failures_come_with_xscales_words(tmp_path: Path) -> None:
    config = tmp_path / "x.yaml"
    config.write_text("")
    with pytest.raises(LaunchError, match="3 does not divide 4 processes"):
        plan_query.query_plan(FAKE, config, ["fake.divides=3"], 4, os.environ)
    with pytest.raises(LaunchError, match="failed with status 1"):
        plan_query.query_plan((sys.executable, "-c", "raise OSError('no disk')"), config, [], 4, os.environ)
    with pytest.raises(LaunchError, match="printed no plan"):
        plan_query.query_plan((sys.executable, "-c", "print('{}')"), config, [], 4, os.environ)
    with pytest.raises(LaunchError, match=r"printed no run\.dir"):
        plan_query.query_run_dir((sys.executable, "-c", "print('{}')"), config, [], os.environ)
    with pytest.raises(LaunchError, match="cannot be started"):
        plan_query.query_plan(("/nowhere/xscale",), config, [], 4, os.environ)


def test_several_runs_are_asked_about_at_once(tmp_path: Path) -> None:
    config = tmp_path / "x.yaml"
    config.write_text("")
    calls = tmp_path / "calls"
    counted = ("sh", "-c", f'echo "$@" >> {calls}; exec {shlex.join(FAKE)} "$@"', "xscale")
    runs = [["run.dir=runs/x", f"train.steps={steps}", f"run.seed={seed}"] for steps in (1, 2) for seed in (3, 4)]
    found = plan_query.query_plans(counted, config, runs, 4, os.environ)
    assert len(calls.read_text().splitlines()) == 1
    assert ["train.steps: 2" in plan.config for plan in found] == [False, False, True, True]
    assert [re.search(r"^  seed: (\d)", plan.config, re.MULTILINE)[1] for plan in found] == ["3", "4"] * 2  # type: ignore[index]
    assert {plan.run_dir for plan in found} == {Path.cwd() / "runs/x"}
    below = found[0].below("a b")
    assert below.run_dir == Path.cwd() / "runs/x/a b"
    assert f'  dir: "{below.run_dir}"' in below.config
    with pytest.raises(LaunchError, match="3 does not divide 4 processes"):
        plan_query.query_plans(counted, config, [[], ["fake.divides=3"]], 4, os.environ)
    with pytest.raises(LaunchError, match="printed no plan"):
        plan_query.query_plans((sys.executable, "-c", "print('[{}]')"), config, [[], ["a=1"]], 4, os.environ)


@pytest.mark.long
def test_xscale_itself_keeps_the_contract(tmp_path: Path) -> None:
    path = f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'launch'}"
    variables = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    plan = plan_query.query_plan(
        plan_query.xscale_command(None), QUICKSTART, [f"run.dir={tmp_path / 'a b'}"], 2, variables
    )
    assert plan.run_dir == tmp_path / "a b"
    assert plan.problems == []
    gpu = ("--device", "h100", "--memory", "0.002")
    small = ["model.width=32", "model.stack.depth=2", "data.sequence_length=32", "parallel.zero.engine=torch"]
    (problem,) = plan_query.query_plan(
        plan_query.xscale_command(None), QUICKSTART, small, 2, variables, gpu=gpu
    ).problems
    assert "needs" in problem
    assert "one h100 has 0.0 GB. Take " in problem
    with pytest.raises(LaunchError, match="'v9' is not in the table of devices"):
        plan_query.query_plan(plan_query.xscale_command(None), QUICKSTART, small, 2, variables, gpu=("--device", "v9"))
    runs = [["train.steps=300"], ["parallel.mesh.tp=3"]]
    with pytest.raises(LaunchError, match=r"does not divide the 2 ranks.*\(with parallel\.mesh\.tp=3\)"):
        plan_query.query_plans(plan_query.xscale_command(None), QUICKSTART, runs, 2, variables)


def test_the_command_of_xscale() -> None:
    assert plan_query.xscale_command(None) == (sys.executable, "-m", "xscale")
    assert plan_query.xscale_command(None, "python3") == ("python3", "-m", "xscale")
    assert plan_query.xscale_command(shlex.join(FAKE)) == FAKE
