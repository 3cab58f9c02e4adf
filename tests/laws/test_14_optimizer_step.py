"""What an optimizer step does stands in one package, and what a model predicts is made in one method of models."""

import ast
from pathlib import Path

import pytest

from tests.laws.bent import unbent
from tests.laws.tree import ROOT, dotted, files, plant

ROOM = "xscale/train/optimizer_step/"
STEP = frozenset({"compute_gradients", "decide_by", "decide", "discard", "update_non_gradient_state"})
"""Functions that training calls for a step alone, whoever has them."""
OF_STEP = frozenset(
    {
        *("stepper.apply", "stepper.step", "engine.apply", "engine.discard", "engine.reduce_gradients"),
        *("optimizer.step", "ema.update", "policy.record"),
    }
)
"""Methods of the parts that a step moves, by the last name of the object."""


def outside_the_step(root: Path) -> dict[str, str]:
    found = {}
    for file in files(root):
        if file.package != "train" or file.path.startswith(ROOM):
            continue
        for node in file.nodes:
            if not isinstance(node, ast.Call):
                continue
            called = dotted(node.func).split(".")
            if called[-1] in STEP or ".".join(called[-2:]) in OF_STEP:
                found[file.at(node, ".".join(called))] = f"what a step does to the weights stands in {ROOM}"
    return found


def predicts_by_itself(root: Path) -> dict[str, str]:
    found = {}
    for file in files(root):
        is_model = file.path.startswith("xscale/nn/model/")
        for node in file.nodes:
            if not isinstance(node, ast.Call):
                continue
            called = dotted(node.func)
            if is_model and called == "self.head":
                found[file.at(node, called)] = "passes over the depth change what a head makes: ask `self.predict`"
            if not is_model and called.rsplit(".", 1)[-1] == "Prediction":
                found[file.at(node, called)] = "a model says what its head is to predict"
    return found


def test_a_step_is_taken_in_one_package() -> None:
    assert unbent("one step", outside_the_step(ROOT)) == []


def test_a_step_is_taken_there() -> None:
    """The names are those of today: a law on names that nobody has would hold nothing."""
    calls = {
        dotted(node.func)
        for file in files(ROOT)
        if file.path.startswith(ROOM)
        for node in file.nodes
        if isinstance(node, ast.Call)
    }
    needed = {"stepper.compute_gradients", "decide_by", "stepper.apply", "stepper.discard", "ema.update"}
    assert needed | {"update_non_gradient_state", "policy.record"} <= calls


def test_a_model_predicts_by_one_method() -> None:
    assert unbent("one prediction", predicts_by_itself(ROOT)) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("xscale__train__loop", "def f(engine):\n    engine.ema.update()"),
        ("xscale__train__after_step__bad", "def f(self):\n    self.stepper.apply(1, 2)"),
        ("xscale__train__bad", "def f(model, means):\n    update_non_gradient_state(model, means)"),
        ("xscale__train__bad", "def f(self):\n    for policy in self.policies:\n        policy.record(1, 2, 3)"),
        ("xscale__train__bad", "def f(losses):\n    return loss_spikes.decide(losses)"),
    ],
)
def test_a_piece_of_a_step_elsewhere_is_seen(tmp_path: Path, name: str, text: str) -> None:
    assert outside_the_step(plant(tmp_path, **{name: text}))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("xscale__nn__model__bad", "def forward(self, x):\n    return self.head(x, None, None)"),
        ("xscale__objective__bad", "def loss(model, x):\n    return model.predict(x, Prediction(model.head, None))"),
    ],
)
def test_a_prediction_elsewhere_is_seen(tmp_path: Path, name: str, text: str) -> None:
    assert predicts_by_itself(plant(tmp_path, **{name: text}))


def test_the_step_itself_and_other_packages_pass(tmp_path: Path) -> None:
    plant(
        tmp_path,
        xscale__train__optimizer_step__bad="def f(engine):\n    engine.ema.update()",
        xscale__planning__good="def f(stepper):\n    stepper.apply(stepper.compute_gradients([]), 1e-3)",
    )
    assert outside_the_step(tmp_path) == {}
