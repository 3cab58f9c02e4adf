"""Runs with gates: `xscale eval --budgets`, and a resumed run."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.test_exit_curve import call
from tests.train.tiny import metrics, recipe, run
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from xscale.evaluate.evaluate_run import budget_curve_of_run, evaluate_run

BLOCK: dict[str, Any] = {"mixer": {"kind": "attention", "heads": 4}, "ffn": {"kind": "dense", "hidden": 48}}
GATES = {"budgets": [0.25, 1.0], "bias": 0.0, "loss_weight": 20.0}


def with_gates(folder: Path, name: str = "run", *, gates: Any = GATES, **sections: Any) -> Any:
    model = {"kind": "decoder", "width": 32, "stack": {"depth": 2, "block": {**BLOCK, "gates": gates}}}
    return recipe(folder, name, model=model, **sections)


@pytest.mark.long
def test_a_run_is_evaluated_at_each_budget_and_resumes_bitwise(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizer": {"kind": "adamw", "lr": 0.1}, "schedule": {"kind": "constant"}}
    settings |= {"train": {"steps": 16, "eval_every": 0}}
    assert run(with_gates(tmp_path, **settings)) == EXIT_DONE
    assert (
        run(with_gates(tmp_path, "parts", **{**settings, "train": {**settings["train"], "stop_after": 2}}))
        == EXIT_REQUEUE
    )
    assert run(with_gates(tmp_path, "parts", **settings)) == EXIT_DONE
    whole, parts = ([line for line in metrics(tmp_path, name) if "loss" in line] for name in ("run", "parts"))
    for name in ("loss", "stack.gates/computed"):
        assert [line[name] for line in whole] == [line[name] for line in parts]
    small, full = budget_curve_of_run(tmp_path / "run", 4)
    assert small["computed"] < full["computed"], "the gates read the budget"
    assert full["loss"] == pytest.approx(evaluate_run(tmp_path / "run", 4)["loss"])
    table = call("eval", tmp_path / "run", "--budgets", "--sequences", 2)
    assert table.splitlines()[1].split() == ["budget", "computed", "loss", "accuracy"]
    assert len(table.splitlines()) == 4
    points = json.loads(call("eval", tmp_path / "run", "--budgets", "--sequences", 2, "--json"))
    assert [point["budget"] for point in points] == [0.25, 1.0]


def test_what_has_no_gates_is_refused(tmp_path: Path) -> None:
    run(with_gates(tmp_path, gates=None, train={"steps": 1}))
    with pytest.raises(ConfigError, match="the model has no gates"):
        budget_curve_of_run(tmp_path / "run", 4)
    with pytest.raises(ConfigError, match="prints another curve"):
        call("eval", tmp_path / "run", "--budgets", "--exits")
