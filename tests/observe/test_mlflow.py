"""The observer for MLflow, against a stand-in for the package: nothing here reaches a network."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from xscale.core.errors import ConfigError
from xscale.observe import EndReport, EvalReport, ObserveConfig, ObserverGroup, SampleReport, TaskReport
from xscale.observe.config import check
from xscale.observe.make_observers import make_observers
from xscale.observe.trackers.mlflow import UNCONFIRMED, Mlflow


class ServerError(Exception):
    """Stands for MlflowException."""


class Stand(ModuleType):
    """The functions of mlflow that the observer calls, with one run for each id."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.__spec__ = SimpleNamespace(name="mlflow")  # type: ignore[assignment]
        self.exceptions = SimpleNamespace(MlflowException=ServerError)
        self.runs: dict[str, dict[str, Any]] = {}
        self.active: dict[str, Any] | None = None
        self.uri: str | None = None
        self.fails = False
        self.fails_behind = False
        """Whether what is sent in the background fails, as when a server is restarted."""

    def set_tracking_uri(self, uri: str) -> None:
        self.uri = uri

    def set_experiment(self, name: str) -> None:
        self.experiment = name

    def start_run(self, run_id: str | None, run_name: str) -> Any:
        assert self.active is None, "a run is active"
        if run_id is not None and run_id not in self.runs:
            raise ServerError(f"Run '{run_id}' not found")
        run_id = run_id or f"id{len(self.runs)}"
        empty = {"name": run_name, "params": {}, "metrics": [], "files": {}}
        self.active = self.runs.setdefault(run_id, empty)
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def log_params(self, params: dict[str, str]) -> None:
        assert self.active is not None
        assert not self.active["params"], "parameters cannot change"
        assert all(len(value) <= 500 for value in params.values())
        self.active["params"] = params

    def log_metrics(self, metrics: dict[str, float], step: int, synchronous: bool) -> Any:
        assert self.active is not None
        if self.fails:
            raise ServerError("the server does not answer")
        assert all(type(value) is float for value in metrics.values())
        if self.fails_behind and not synchronous:
            return SimpleNamespace(wait=self._refuse)
        self.active["metrics"].append((step, metrics))
        return None if synchronous else SimpleNamespace(wait=lambda: None)

    def _refuse(self) -> None:
        raise ServerError("The following failures occurred: the server was restarted")

    def log_dict(self, data: Any, file: str) -> None:
        assert self.active is not None
        self.active["files"][file] = data

    def log_text(self, text: str, file: str) -> None:
        self.log_dict(text, file)

    def end_run(self, status: str) -> None:
        assert self.active is not None
        self.active["status"], self.active = status, None


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Stand:
    stand = Stand()
    monkeypatch.setitem(sys.modules, "mlflow", stand)
    return stand


def test_numbers_config_and_end(package: Stand, facts: Any, step: Any, tmp_path: Path) -> None:
    observer = Mlflow(tmp_path, "lab", "http://localhost:5000")
    observer.start(facts())
    observer.step(step(1))
    observer.evaluated(EvalReport(1, 2.0, 7.4, None, 1.0))
    observer.tasks_evaluated(TaskReport(1, {"gsm8k/exact_match,strict-match": 0.5}, 1.0))
    observer.sampled(SampleReport(1, "a", "b"))
    observer.finish(EndReport(1, "failed"))
    assert (package.uri, package.experiment) == ("http://localhost:5000", "lab")
    (run,) = package.runs.values()
    assert run["params"]["train.steps"] == "40"
    assert run["files"]["config/step-1.yaml"]["train"] == {"steps": 40}
    assert run["files"]["samples/step-1.txt"] == "ab"
    (_, row), (_, evaluation), (_, tasks) = run["metrics"]
    assert row["stack.blocks.1.ffn.part/load/3"] == 0.1
    assert evaluation == {"eval/loss": 2.0, "eval/perplexity": 7.4}
    assert tasks == {"tasks/gsm8k/exact_match_strict-match": 0.5}, "MLflow refuses a comma"
    assert run["status"] == "FAILED"


def test_a_requeued_run_goes_on_in_the_same_run(package: Stand, facts: Any, step: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for resumed in (None, 1):
        observer = Mlflow(tmp_path / "run", "lab", None)
        observer.start(facts(resumed_from=resumed, first_step=1 if resumed is None else 2))
        observer.step(step(1 if resumed is None else 2))
        observer.finish(EndReport(1, "stopped"))
    (run,) = package.runs.values()
    assert [number for number, _ in run["metrics"]] == [1, 2]
    assert list(run["files"]) == ["config/step-1.yaml", "config/step-2.yaml"]
    assert run["status"] == "KILLED"
    assert package.uri is None, "MLflow's own settings say"
    assert (tmp_path / "run" / "mlflow_id").read_text(encoding="utf-8") == "id0\n"


def test_a_server_that_fails_ends_the_observer_and_not_the_run(
    package: Stand, facts: Any, step: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group = ObserverGroup([Mlflow(tmp_path, "lab", None)])
    group.start(facts())
    package.fails = True
    group.step(step(1))
    assert "MLflow: the server does not answer" in capsys.readouterr().err
    (tmp_path / "mlflow_id").write_text("gone", encoding="utf-8")
    package.active = None
    group = ObserverGroup([Mlflow(tmp_path, "lab", None)])
    group.start(facts(resumed_from=1))
    assert "Run 'gone' not found" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [3, UNCONFIRMED + 3])
def test_a_row_that_failed_in_the_background_is_sent_again(
    rows: int, package: Stand, facts: Any, step: Any, tmp_path: Path
) -> None:
    """The package tells its errors to who waits, and to nobody else."""
    observer = Mlflow(tmp_path, "lab", None)
    observer.start(facts())
    package.fails_behind = True
    for number in range(1, rows + 1):
        observer.step(step(number))
        package.fails_behind = number % 2 == 0
    observer.finish(EndReport(rows, "done"))
    (run,) = package.runs.values()
    assert sorted(number for number, _ in run["metrics"]) == list(range(1, rows + 1))
    assert observer.backlog.missing == 0


@pytest.mark.parametrize("said", [None, "9"])
def test_a_server_that_does_not_answer_holds_no_step_for_minutes(
    said: str | None, package: Stand, facts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the environment says stays."""
    names = ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT")
    for name in names:
        # Set first, so that what is set in between is taken away behind it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name) if said is None else monkeypatch.setenv(name, said)
    Mlflow(tmp_path, "lab", None).start(facts())
    assert [os.environ[name] for name in names] == (["2", "10"] if said is None else ["9", "9"])


def test_rows_that_no_server_took_are_said_to_be_missing(
    package: Stand, facts: Any, step: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group = ObserverGroup([Mlflow(tmp_path, "lab", None)])
    group.start(facts())
    package.fails_behind = True
    for number in (1, 2, 3):
        group.step(step(number))
    package.fails = True
    group.finish(EndReport(3, "done"))
    assert "3 entries of Mlflow could not be written (MLflow: the server does not answer)" in capsys.readouterr().err


def test_a_missing_package_is_refused_with_what_would_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = check(ObserveConfig(mlflow=True), "observe")
    assert problem.path == "observe.mlflow"
    assert "pip install 'mlflow-skinny>=3.0'" in problem.advice
    with pytest.raises(ConfigError, match="mlflow is not installed"):
        make_observers(ObserveConfig(mlflow=True), tmp_path)
