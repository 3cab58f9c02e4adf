"""Golden losses: each recipe of configs/run, made small, computes what it computed when the losses were recorded.

After a change that is meant to change numbers: python -m tests.golden.test_losses
"""

import json
import tempfile
from pathlib import Path

import pytest

from tests.golden.shrink import RECIPES, STEPS, small
from xscale.train.run import train

FILE = Path(__file__).parent / "losses.json"
GOLDEN: dict[str, list[float]] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def losses(recipe: Path, folder: Path) -> list[float]:
    """The loss of each step, in nats."""
    run = small(recipe, folder)
    assert train(run) == 0
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


COMPILED = {"dense_1b", "dense_7b", "fineweb"}
"""Recipes that are compiled, which takes half a minute."""


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(recipe, marks=pytest.mark.long if recipe.stem in COMPILED else ()) for recipe in RECIPES],
    ids=lambda recipe: str(recipe.stem),
)
def test_a_recipe_computes_its_golden_losses(recipe: Path, tmp_path: Path) -> None:
    assert losses(recipe, tmp_path) == pytest.approx(GOLDEN[recipe.stem], rel=1e-10)


def test_the_golden_losses_are_those_of_the_recipes() -> None:
    assert sorted(GOLDEN) == sorted(recipe.stem for recipe in RECIPES)
    assert all(len(values) == STEPS and values[-1] != values[0] for values in GOLDEN.values())


if __name__ == "__main__":
    made = {}
    for path in RECIPES:
        with tempfile.TemporaryDirectory() as name:
            made[path.stem] = losses(path, Path(name))
    FILE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
