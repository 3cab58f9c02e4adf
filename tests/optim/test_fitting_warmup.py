"""The warm-up of a run that an override shortens: it is a tenth of the run where the recipe's does not fit."""

from pathlib import Path
from typing import Any

import pytest

from xscale.core.compose import compose, compose_mapping, dump
from xscale.core.config import encode
from xscale.core.yaml_writer import flow_text
from xscale.optim.schedule import SCHEDULES
from xscale.recipe import decode_recipe, read_and_check

CASES: dict[str, tuple[dict[str, Any], list[str], int]] = {
    "fits": ({"warmup_steps": 40}, ["train.steps=41"], 40),
    "as long as the run": ({"warmup_steps": 40}, ["train.steps=40"], 4),
    "longer": ({"warmup_steps": 40}, ["train.steps=25"], 2),
    "one step at least": ({"warmup_steps": 40}, ["train.steps=5"], 1),
    "one step of training": ({"warmup_steps": 40}, ["train.steps=1"], 40),
    "the default": ({}, ["train.steps=30"], 3),
    "of any schedule": ({"kind": "inverse_sqrt", "warmup_steps": 40}, ["train.steps=20"], 2),
    "of an override of the kind": ({"warmup_steps": 40}, ["schedule.kind=constant", "train.steps=20"], 2),
    "a section as an override": ({"warmup_steps": 40}, ["train={steps: 20}"], 2),
    "typed": ({"warmup_steps": 40}, ["train.steps=20", "schedule.warmup_steps=40"], 40),
    "typed as a section": ({}, ["train.steps=20", "schedule={kind: constant, warmup_steps: 40}"], 40),
    "longer than the file's run": ({"warmup_steps": 40}, ["schedule.warmup_steps=1000"], 1000),
    "the author's": ({"warmup_steps": 400}, [], 400),
}


@pytest.mark.parametrize(("schedule", "overrides", "expected"), CASES.values(), ids=CASES)
def test_only_a_shortened_run_has_another_warm_up(
    schedule: dict[str, Any], overrides: list[str], expected: int
) -> None:
    composed = compose_mapping({"train": {"steps": 400}, "schedule": {"kind": "cosine", **schedule}}, overrides)
    recipe = decode_recipe(composed)
    assert recipe.schedule.warmup_steps == expected
    # A shortened one is said in a sentence; one that does not fit and was meant is warned of.
    assert len(composed.fitted) == (expected not in (40, 400, 1000))
    meant = expected >= recipe.train.steps > 1
    assert [problem.path for problem in recipe.warnings()] == ["schedule.warmup_steps"] * meant
    built = SCHEDULES.build(recipe.schedule, recipe.train.steps)
    assert meant or recipe.train.steps == 1 or max(map(built.factor, range(1, recipe.train.steps + 1))) == 1


def test_phases_are_checked_with_the_warm_up_that_is_used() -> None:
    sections = {"schedule": {"kind": "wsd", "warmup_steps": 40, "decay_steps": 10}}
    recipe, _ = read_and_check(compose_mapping(sections, ["train.steps=20", "train.eval_every=0"]))
    assert recipe.schedule.warmup_steps == 2


def test_what_was_used_is_recorded_and_stays_when_the_record_is_run_for_longer(tmp_path: Path) -> None:
    composed = compose_mapping({"schedule": {"kind": "cosine", "warmup_steps": 40}}, ["train.steps=20"])
    recorded = encode(decode_recipe(composed))
    file = tmp_path / "config.yaml"
    file.write_text(flow_text(recorded), encoding="utf-8")
    assert decode_recipe(compose(file, ["train.steps=400"])).schedule.warmup_steps == 2
    # The origin of the value is not its file, which has another.
    (line,) = (line.split() for line in dump(recorded, composed.origin).splitlines() if "warmup_steps" in line)
    assert " ".join(line) == "warmup_steps: 2 # fits train.steps=20, in place of 40"
