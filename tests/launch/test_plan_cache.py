"""Answers of `xscale plan` are used again while nothing that they depend on has changed, and only then."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from xscale_launch.plans import plan_cache, plan_query

ROOT = Path(__file__).parents[2]


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with one answer, and the config file that it was read from."""
    config = tmp_path / "x.yaml"
    config.write_text("a: 1\n")
    files = [str(config), str(tmp_path / "looked-for.yaml")]
    plan_cache.store(
        tmp_path / "plans", "one", {"config": "a: 1\n", "run_dir": "runs/x", "files": files, "plugins": []}
    )
    return tmp_path / "plans", config


def test_the_same_answer_comes_back(kept: tuple[Path, Path]) -> None:
    found = plan_cache.load(kept[0], "one")
    assert found is not None
    assert found.answer["config"] == "a: 1\n"
    assert 0 <= found.seconds_ago < 60
    assert plan_cache.load(kept[0], "two") is None


@pytest.mark.parametrize("change", ["edited", "gone", "nearer"])
def test_a_changed_file_is_asked_about_again(kept: tuple[Path, Path], change: str) -> None:
    place, config = kept
    if change == "edited":
        config.write_text("a: 2\n")
    elif change == "gone":
        config.unlink()
    else:  # a file that `use` looked for first is there now
        (config.parent / "looked-for.yaml").write_text("b: 1\n")
    assert plan_cache.load(place, "one") is None


def test_half_an_answer_is_none(kept: tuple[Path, Path]) -> None:
    (kept[0] / "one.json").write_text('{"answer": {"con')
    assert plan_cache.load(kept[0], "one") is None
    (kept[0] / "one.json").write_text("[]")
    assert plan_cache.load(kept[0], "one") is None


def test_what_a_plugin_says_is_not_kept(tmp_path: Path) -> None:
    plan_cache.store(tmp_path, "one", {"config": "", "run_dir": "", "files": [], "plugins": ["my_lab.attention"]})
    plan_cache.store(tmp_path, "two", {"config": "", "run_dir": ""})
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    plan_cache.store(tmp_path / "file" / "plans", "one", {"files": []})


def test_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MAX_ANSWERS", 2)
    for age, name in enumerate("abcd"):
        plan_cache.store(tmp_path, name, {"files": []})
        os.utime(tmp_path / f"{name}.json", (age, age))
    plan_cache.store(tmp_path, "e", {"files": []})
    assert {path.stem for path in tmp_path.iterdir()} == {"d", "e"}


def test_the_question_the_code_and_the_place_make_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("xscale", "xscale_kernels"):
        (tmp_path / "code" / name).mkdir(parents=True)
        (tmp_path / "code" / name / "__init__.py").write_text("one = 1\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "code")])
    for name in [name for name in sys.modules if name.partition(".")[0] in ("xscale", "xscale_kernels")]:
        monkeypatch.delitem(sys.modules, name)

    def key(*question: str, **variables: str) -> str:
        return plan_cache.key(question, plan_cache.environment_key(variables))

    keys = [key("plan", "x.yaml"), key("plan", "x.yaml", "train.steps=3"), key("plan", "x.yaml", PYTHONPATH="/else")]
    (tmp_path / "code/xscale_kernels/__init__.py").write_text("one = 2\n")
    keys.append(key("plan", "x.yaml"))
    monkeypatch.chdir(tmp_path)
    keys.append(key("plan", "x.yaml"))
    assert len(set(keys)) == 5
    assert key("plan", "x.yaml") == keys[-1]


@pytest.mark.nightly
def test_xscale_is_asked_once(tmp_path: Path) -> None:
    config = tmp_path / "x.yaml"
    config.write_text(json.dumps({"use": [str(ROOT / "configs/run/quickstart.yaml")]}))
    path = f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'launch'}"
    variables = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    told: list[str] = []
    answers = [
        plan_query.query_plan(plan_query.xscale_command(None), config, [], 2, variables, told.append) for _ in range(2)
    ]
    assert answers[0] == answers[1]
    assert len(told) == 1
    assert "were checked" in told[0]
    (answer,) = (tmp_path / "cache/xscale/plans").iterdir()
    files = json.loads(answer.read_text())["files"]
    assert files[str(config)]
    assert files[str(ROOT / "configs/model/switch_tiny.yaml")]
    config.write_text(json.dumps({"use": [str(ROOT / "configs/run/quickstart.yaml")], "train": {"steps": 3}}))
    again = plan_query.query_plan(plan_query.xscale_command(None), config, [], 2, variables, told.append)
    assert len(told) == 1
    assert again.config != answers[0].config
    # Under another name and with another seed it is the same question, and so it is in a sweep.
    named = [["run.dir=runs/other", "run.seed=4"], ["run.dir=runs/another"]]
    other, another = plan_query.query_plans(plan_query.xscale_command(None), config, named, 2, variables, told.append)
    assert len(told) == 2
    assert (other.run_dir, another.run_dir) == (Path.cwd() / "runs/other", Path.cwd() / "runs/another")
    assert re.search(r"^  seed: 4 .*# command line$", other.config, re.MULTILINE)
    # Of a sweep only the members that are new are asked about.
    sweep = [[], ["train.steps=5"]]
    plan_query.query_plans(plan_query.xscale_command(None), config, sweep, 2, variables, told.append)
    assert len(told) == 2
    plan_query.query_plans(plan_query.xscale_command(None), config, sweep, 2, variables, told.append)
    assert len(told) == 3
