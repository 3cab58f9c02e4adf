"""Another run folder or seed makes no other question, and the config that comes of it is the one xscale would show."""

from pathlib import Path

import pytest
import yaml

from xscale.commands.plan import read_from
from xscale.recipe import read
from xscale_launch.plans import plan_query

QUICKSTART = Path(__file__).parents[2] / "configs/run/quickstart.yaml"


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
    found = plan_query.RUN_DIR.search(text)
    assert found is not None
    assert found["value"] == folder


def test_a_folder_called_dir_elsewhere_is_not_it() -> None:
    assert plan_query.RUN_DIR.search("run:\n  seed: 0\nmodel:\n  dir: no\n") is None


@pytest.mark.parametrize(
    ("overrides", "asked", "settings"),
    [
        (["run.dir=runs/x", "a=1", "run.seed=7"], ["a=1"], {"dir": "runs/x", "seed": "7"}),
        (["run.dir=runs/x", "run.dir=/tmp/lr=1e-3,seed=1/y"], [], {"dir": "/tmp/lr=1e-3,seed=1/y"}),
        (["run.dir=../x", "run.seed=0"], [], {"dir": "../x", "seed": "0"}),
    ],
)
def test_ignorable_overrides_are_split_off(overrides: list[str], asked: list[str], settings: dict[str, str]) -> None:
    assert plan_query.split_overrides(overrides) == (tuple(asked), settings)


@pytest.mark.parametrize(
    "override",
    ["run.dir=3", "run.dir=null", "run.dir=", "run.dir=a b/c", "run.dir='a/b'", "run.dir=~/x", "run.dir={a: b/c}",
     "run.seed=-1", "run.seed=07", "run.seed=x", "run.seed=1.5", "run={dir: a/b}", "run.fresh=true", "run.sede=1"],
)  # fmt: skip
def test_what_xscale_has_to_see(override: str) -> None:
    overrides = ["run.dir=runs/x", override, "a=1"]
    assert plan_query.split_overrides(overrides) == (tuple(overrides), {})


@pytest.mark.parametrize(
    "settings",
    [
        {"dir": "runs/another"},
        {"seed": "12"},
        {"dir": "/a/very/long/path/that/goes/beyond/the/column/in/which/comments/stand", "seed": "3"},
    ],
)
def test_the_config_is_the_one_that_xscale_would_show(settings: dict[str, str]) -> None:
    def shown(overrides: list[str]) -> str:
        text: str = read_from(*read(QUICKSTART, overrides))["config"]
        return text

    overrides = [f"run.{key}={value}" for key, value in settings.items()]
    assert plan_query.split_overrides(overrides) == ((), settings)
    assert plan_query.with_settings(shown([]), settings) == shown(overrides)


def test_a_folder_that_needs_quotes_gets_them() -> None:
    config = plan_query.with_settings("run:\n  dir: runs/x  # default\n  seed: 0\n", {"dir": "/a: b/#c"}, "the sweep")
    assert yaml.safe_load(config) == {"run": {"dir": "/a: b/#c", "seed": 0}}
    assert config.splitlines()[1].endswith("  # the sweep")
