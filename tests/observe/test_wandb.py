"""The observer for Weights & Biases, against a stand-in for the package: nothing here reaches a network."""

import os
import subprocess
import sys
import types

import pytest

from xscale.core.errors import ConfigError
from xscale.observe import EndReport, EvalReport, ObserveConfig, ObserverGroup, TaskReport
from xscale.observe.config import check
from xscale.observe.make_observers import make_observers
from xscale.observe.trackers.wandb import Wandb


class Fake(types.ModuleType):
    class Error(Exception):
        pass

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = types.SimpleNamespace(name="wandb")
        self.rows, self.fail, self.code = [], False, None

    def init(self, **options):
        self.options = options
        return self

    def log(self, row, step):
        if self.fail:
            raise self.Error("network is unreachable")
        self.rows.append((step, row))

    def finish(self, exit_code):
        self.code = exit_code


@pytest.fixture
def fake(monkeypatch):
    package = Fake()
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def test_rows_config_and_exit(fake, facts, step, tmp_path):
    observer = Wandb(tmp_path, "lab")
    observer.start(facts())
    observer.step(step(1))
    observer.evaluated(EvalReport(1, 2.0, 7.4, None, 1.0))
    observer.finish(EndReport(1, "failed"))
    assert fake.options["project"] == "lab"
    assert fake.options["config"]["train"] == {"steps": 40}
    (_, row), (_, evaluation) = fake.rows
    assert row["stack.blocks.1.ffn.part/load/3"] == 0.1
    assert evaluation == {"eval/loss": 2.0, "eval/perplexity": 7.4}
    assert fake.code == 1


def test_a_requeued_run_goes_on_in_the_same_run(fake, facts, step, tmp_path):
    """By an id in the run folder, which another folder does not share."""
    ids = []
    (tmp_path / "run").mkdir()
    (tmp_path / "other").mkdir()
    for resumed in (None, 1):
        observer = Wandb(tmp_path / "run", "lab")
        observer.start(facts(resumed_from=resumed))
        observer.step(step(1 if resumed is None else 2))
        observer.finish(EndReport(1, "stopped"))
        assert fake.options["resume"] == "allow"
        ids.append(fake.options["id"])
    assert ids[0] == ids[1] == (tmp_path / "run" / "wandb_id").read_text().strip()
    assert [number for number, _ in fake.rows] == [1, 2]
    Wandb(tmp_path / "other", "lab").start(facts())
    assert fake.options["id"] != ids[0]


@pytest.mark.parametrize("stored", ["../../elsewhere", "a/b", "", "-x", "a b", "é", "x" * 129])
def test_what_is_no_id_is_not_used(fake, facts, step, tmp_path, capsys, stored):
    """The package makes names of files of it."""
    (tmp_path / "wandb_id").write_text(stored)
    audience = ObserverGroup([Wandb(tmp_path, "lab")])
    audience.start(facts())
    audience.step(step(1))
    audience.finish(EndReport(1, "done"))
    assert not hasattr(fake, "options")
    assert "warning: Wandb cannot be written (this is not the id of a run)" in capsys.readouterr().err
    assert audience.unwritten() == "2 entries of Wandb"


PROGRAM = """
import pathlib, sys, types, wandb
from xscale.observe.trackers.wandb import Wandb
observer = Wandb(pathlib.Path(sys.argv[1]), "lab")
observer.start(types.SimpleNamespace(config={"a": 1}))
observer._log({"loss": 1.0}, 1)
print(observer._run.settings.base_url, observer._run.settings.wandb_dir)
observer.finish(types.SimpleNamespace(reason="done"))
"""


def test_the_package_believes_no_settings_of_a_run_folder(tmp_path):
    """The package itself, offline: `wandb/settings` would name the server that gets the numbers and the key."""
    pytest.importorskip("wandb", reason="the extra [wandb] is not installed")
    for name in ("run/wandb", "here", "outside"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "run" / "wandb" / "settings").write_text("[default]\nbase_url = http://elsewhere.invalid\n")
    for name in ("debug.log", "debug-internal.log", "latest-run"):
        (tmp_path / "run" / "wandb" / name).symlink_to(tmp_path / "outside" / name)
    environment = os.environ | {"WANDB_MODE": "offline", "HOME": str(tmp_path / "here")}
    words = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    ended = subprocess.run(words, env=environment, cwd=tmp_path / "here", capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "elsewhere.invalid" not in ended.stdout + ended.stderr
    assert str(tmp_path / "run" / "wandb") in ended.stdout
    assert not list((tmp_path / "outside").iterdir())


def test_tasks(fake, facts, tmp_path):
    observer = Wandb(tmp_path, "lab")
    observer.start(facts())
    observer.tasks_evaluated(TaskReport(3, {"hellaswag/acc": 0.25, "hellaswag/acc_stderr": float("nan")}, 1.0))
    assert fake.rows == [(3, {"tasks/hellaswag/acc": 0.25})]


def test_a_lost_network_loses_no_number(fake, facts, step, tmp_path, capsys):
    audience = ObserverGroup([Wandb(tmp_path, "lab")])
    audience.start(facts())
    fake.fail = True
    audience.step(step(1))
    audience.step(step(2))
    assert "warning: Wandb cannot be written (Weights & Biases: network is unreachable)" in capsys.readouterr().err
    assert audience.unwritten() == "2 entries of Wandb"
    fake.fail = False
    audience.step(step(3))
    assert [number for number, _ in fake.rows] == [1, 2, 3]
    assert "Wandb is written again, and nothing is missing" in capsys.readouterr().err


def test_a_service_that_does_not_answer_at_the_start_is_asked_again(fake, facts, step, tmp_path, capsys):
    audience, init = ObserverGroup([Wandb(tmp_path, "lab")]), fake.init
    fake.init = lambda **_: (_ for _ in ()).throw(fake.Error("no answer"))
    audience.start(facts())
    assert "no answer" in capsys.readouterr().err
    audience.step(step(1))
    fake.init = init
    audience.step(step(2))
    audience.finish(EndReport(2, "done"))
    assert [number for number, _ in fake.rows] == [1, 2]
    assert fake.code == 0


def test_a_missing_package_is_refused_with_what_would_work(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = ObserveConfig(wandb=True)
    (problem,) = check(config, "observe")
    assert problem.path == "observe.wandb"
    assert "Take false." in problem.advice
    with pytest.raises(ConfigError, match="wandb is not installed"):
        make_observers(config, tmp_path)
    assert not list(tmp_path.iterdir())
    assert check(ObserveConfig()) == []
