"""Runs with exits: their metrics, a resumed run, `xscale eval --exits`, and generation by their policy."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.train.tiny import metrics, recipe, run
from xscale.cli.main import app
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from xscale.evaluate.evaluate_run import evaluate_run, exit_curve_of_run
from xscale.run.load_run import load_run

BLOCK = {"mixer": {"kind": "attention", "heads": 4}, "ffn": {"kind": "dense", "hidden": 48}, "dropout": 0.1}
POLICY = {"criterion": "entropy", "threshold": 5.0}


def with_exits(folder: Path, name: str = "run", *, exits: Any = None, **sections: Any) -> Any:
    exits = {"policy": POLICY} if exits is None else exits
    model = {"kind": "decoder", "width": 32, "stack": {"depth": 3, "block": BLOCK, "exits": exits or None}}
    return recipe(folder, name, model=model, **sections)


def call(*words: object) -> str:
    """Run the command line; returns what it prints, and raises a ConfigError."""
    found = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(found.exception, ConfigError):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.output


@pytest.mark.long
def test_a_run_reports_its_exits_and_resumes_bitwise(tmp_path: Path) -> None:
    assert run(with_exits(tmp_path)) == EXIT_DONE
    assert run(with_exits(tmp_path, "parts", train={"stop_after": 2})) == EXIT_REQUEUE
    assert run(with_exits(tmp_path, "parts")) == EXIT_DONE
    whole, parts = ([line for line in metrics(tmp_path, name) if "loss" in line] for name in ("run", "parts"))
    for name in ("loss", "stack.exits.at.0/loss", "stack.exits.at.1/loss"):
        assert [line[name] for line in whole] == [line[name] for line in parts]
    assert whole[0]["stack.exits.at.0/loss"] > whole[-1]["stack.exits.at.0/loss"]


@pytest.mark.long
def test_a_resumed_run_ends_the_losses_at_the_same_steps(tmp_path: Path) -> None:
    exits = {"stop": "by_depth", "second_target": 0.5}
    assert run(with_exits(tmp_path, exits=exits)) == EXIT_DONE
    assert run(with_exits(tmp_path, "parts", exits=exits, train={"stop_after": 1})) == EXIT_REQUEUE
    assert run(with_exits(tmp_path, "parts", exits=exits)) == EXIT_DONE
    run(with_exits(tmp_path, "on", exits={"second_target": 0.5}))
    whole, parts, going_on = (
        [line for line in metrics(tmp_path, name) if "loss" in line] for name in ("run", "parts", "on")
    )
    for name in ("loss", "stack.exits.at.0/loss", "stack.exits.second/loss"):
        assert [line[name] for line in whole] == [line[name] for line in parts]
        assert [line[name] for line in whole[:2]] == [line[name] for line in going_on[:2]]
        assert whole[3][name] != going_on[3][name]


@pytest.mark.long
def test_the_second_stage_trains_the_exits_alone(tmp_path: Path) -> None:
    groups = [{"match": "*.exits.*", "since": 0.5}, {"match": "*", "until": 0.5}]
    asked: dict[str, Any] = {"exits": {"two_stage": 0.5}, "optimizer": {"kind": "adamw", "lr": 0.01, "groups": groups}}
    weights = []
    for steps in (2, 1, 3):
        run(with_exits(tmp_path, **asked, train={"stop_after": steps}))
        weights.append({name: value.clone() for name, value in load_run(tmp_path / "run").model.named_parameters()})
    early, change, end = weights
    for name in end:
        first, second = torch.equal(early[name], change[name]), torch.equal(change[name], end[name])
        assert (first, second) == ((True, False) if ".exits." in name else (False, True)), name
    wrong = with_exits(tmp_path, "wrong", exits={"two_stage": 0.5})
    (problem,) = wrong.check(1)
    assert "Take [{match: '*.exits.*', since: 0.5}, {match: '*', until: 0.5}]." in str(problem)
    never = {"kind": "adamw", "groups": [{"match": "*", "since": 0.5, "until": 0.5}]}
    (problem,) = with_exits(tmp_path, "never", optimizer=never).check(1)
    assert "the parameters would never be trained" in str(problem)


def test_a_curve_goes_from_the_first_exit_to_all_blocks(tmp_path: Path) -> None:
    run(with_exits(tmp_path, optimizer={"kind": "adamw", "lr": 0.02}))
    folder = tmp_path / "run"
    first, *usual, none, plain = exit_curve_of_run(folder, 4, [99.0, *(5.5 - 0.015 * step for step in range(40)), 0.0])
    assert first["blocks"] == pytest.approx(1 / 3)
    assert none["blocks"] == plain["blocks"] == 1.0
    shares = [float(point["blocks"] or 0) for point in (first, *usual, none)]
    assert shares == sorted(shares)
    assert any(1 / 3 < share < 1 for share in shares)
    assert plain["threshold"] is None
    assert none["loss"] == plain["loss"]
    assert math.isclose(plain["loss"] or 0, evaluate_run(folder, 4)["loss"], rel_tol=1e-6)
    assert 0 <= (first["accuracy"] or 0) <= 1
    table = call("eval", folder, "--exits", "--sequences", 2, "--thresholds", "5.4,1")
    assert table.splitlines()[0].split() == ["step", "6"]
    assert table.splitlines()[1].split() == ["threshold", "blocks", "loss", "accuracy"]
    assert len(table.splitlines()) == 5
    points = json.loads(call("eval", folder, "--exits", "--sequences", 2, "--json"))
    assert len(points) > 4
    assert points[-1]["threshold"] is None


def test_generation_uses_the_exits_unless_told_otherwise(tmp_path: Path) -> None:
    run(with_exits(tmp_path, exits={"policy": {"criterion": "entropy", "threshold": 0.0}}))
    words = ("generate", tmp_path / "run", "--prompt", "def ", "--tokens", 4)
    assert call(*words) == call(*words, "--no-exits")


@pytest.mark.long
def test_what_has_no_exits_is_refused(tmp_path: Path) -> None:
    run(with_exits(tmp_path, exits={}, train={"steps": 1}))
    with pytest.raises(ConfigError, match="the model has no exits"):
        exit_curve_of_run(tmp_path / "run", 4)
    run(with_exits(tmp_path, "silent", exits={"head": "shared"}, train={"steps": 1}))
    with pytest.raises(ConfigError, match="the exits of the model have no policy"):
        exit_curve_of_run(tmp_path / "silent", 4)
    run(with_exits(tmp_path, "exits", train={"steps": 1}))
    for thresholds, said in (("1,-2", "from 0 on, got -2"), ("nan", "got nan"), ("a", "'a' is not a list of numbers")):
        with pytest.raises(ConfigError, match=said):
            call("eval", tmp_path / "exits", "--exits", "--thresholds", thresholds)
    with pytest.raises(ConfigError, match="Add --exits, or omit it"):
        call("eval", tmp_path / "exits", "--thresholds", "1")


LABELLED: dict[str, dict[str, Any]] = {
    "classify": {
        "objective": {"kind": "classify", "classes": 3, "dense": True},
        "policy": {"criterion": "entropy", "threshold": 0.5},
        "thresholds": [2.0, 0.9, 0.0],
    },
    "regress": {
        "objective": {"kind": "regress"},
        "policy": {"criterion": "patience", "threshold": 1, "tolerance": 0.3},
        "thresholds": [1.0],
    },
    "tag": {
        "objective": {"kind": "tag", "classes": 3},
        "policy": {"criterion": "uncertainty", "threshold": 0.5, "window": 1},
        "thresholds": [1.0, 0.9, 0.0],
    },
}
"""Objective on labels -> its section, a policy, and thresholds from the first exit to all blocks."""


def labelled(folder: Path, kind: str, **exits: Any) -> Any:
    """A recipe of an encoder with exits, on numbers in letters."""
    kinds = {"classify": "class", "regress": "score", "tag": "tags"}
    rows = []
    for number in range(90):
        words = ["abcdefghij"[int(digit)] for digit in str(number)]
        tags = [CLASSES[ord(word) % 3] for word in words]
        label = {"classify": CLASSES[number % 3], "regress": number / 90, "tag": tags}[kind]
        rows.append({"text": " ".join(words), "label": label})
    file = folder / f"{kind}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "labelled", "paths": [str(file)], "labels": kinds[kind]}
    source |= {"classes": CLASSES} if kind != "regress" else {}
    stack = {"depth": 3, "block": BLOCK, "exits": {"policy": LABELLED[kind]["policy"], **exits}}
    return recipe(
        folder,
        kind,
        model={"kind": "encoder", "width": 32, "position": "learned", "stack": stack},
        objective=LABELLED[kind]["objective"],
        data={"source": source},
        optimizer={"kind": "adamw", "lr": 0.01},
        train={"steps": 8, "eval_every": 0, "micro_batch_size": 8},
    )


CLASSES = ["even", "odd", "big"]


@pytest.mark.long
@pytest.mark.parametrize("kind", LABELLED)
def test_examples_and_words_leave_at_exits(tmp_path: Path, kind: str) -> None:
    assert run(labelled(tmp_path, kind)) == EXIT_DONE
    folder = tmp_path / kind
    points = exit_curve_of_run(folder, None, LABELLED[kind]["thresholds"])
    evaluation = evaluate_run(folder, None)
    assert points[-1] == {
        "step": 8,
        "threshold": None,
        "blocks": 1.0,
        **{k: v for k, v in evaluation.items() if k != "step"},
    }
    assert points[0].keys() == points[-1].keys(), "the metrics are those of the objective"
    shares = [float(point["blocks"] or 0) for point in points]
    assert shares == sorted(shares)
    if kind == "regress":
        assert 2 / 3 <= shares[0] <= 1
    else:
        assert shares[0] == pytest.approx(1 / 3)
        assert shares[-2] == 1.0
    table = call("eval", folder, "--exits").splitlines()
    assert table[1].split() == list(points[0])[1:]
