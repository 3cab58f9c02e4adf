"""The observer for Weights & Biases, against a stand-in for the package: nothing here reaches a network."""

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
