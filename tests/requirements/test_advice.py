"""Every advice of every refusal in the table is followed: fewer problems are left, and never the one that it is for."""

import re

import pytest

from tests.requirements.part_refusals import PARTS
from tests.requirements.refusals import REFUSALS, refused
from xscale.core.compose import compose_mapping
from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError, Problem
from xscale.core.yaml_writer import flow_text
from xscale.mesh import axes
from xscale.recipe import Recipe
from xscale.requirements.check import REQUIREMENTS, unsolved
from xscale.requirements.solver import NOTHING

OVERRIDE = re.compile(r"[a-z_]+(?:\[\d+\])?(?:\.[a-z_0-9]+(?:\[\d+\])?)+=[\w.-]+")
"""A key with its value, in a sentence."""


def followed(recipe: Recipe, *overrides: str) -> Recipe:
    """The recipe with overrides, as the command line has them."""
    composed = compose_mapping(encode(recipe), list(overrides))
    if composed.problems:
        raise ConfigError(composed.problems)
    return decode(Recipe, composed.data)


def problems_of(recipe: Recipe) -> list[Problem]:
    """Problems on the fewest ranks of the mesh, which are those of the table."""
    return unsolved(recipe, axes.min_world_size(recipe.parallel.mesh))


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_advised_is_accepted(name: str) -> None:
    recipe, world = refused(name)
    problems = recipe.check(world)
    assert problems
    assert not recipe.is_valid(world)
    for problem in problems:
        assert problem.advice, problem
        assert NOTHING not in problem.advice, problem
        overrides = [
            tuple(f"{key}={flow_text(value)}" for key, value in (*choice.edits, *choice.further))
            for choice in problem.choices
        ]
        if not problem.choices:
            # A sentence that is written by hand.
            overrides = [(text.rstrip("."),) for text in OVERRIDE.findall(problem.advice)]
        for edits in overrides:
            after = problems_of(followed(recipe, *edits))
            assert problem not in after, f"{edits} leaves {problem}"
            assert len(after) < len(problems), f"{edits} ends {problem}, and makes {after}"


@pytest.mark.parametrize("name", [name for name in REFUSALS if name not in PARTS])
def test_the_requirement_of_the_table_speaks(name: str) -> None:
    recipe, world = refused(name)
    given = {"settings": recipe, "world": world, **{key: getattr(recipe, key) for key in Recipe.model_fields}}
    spoken = [requirement for requirement, problems in REQUIREMENTS.facts(given).problems().items() if problems]
    assert REFUSALS[name][0] in spoken


WITHOUT = {
    "schedule_fits_the_steps": "tests/conformance/test_schedule.py has them",
    "observers_can_run": "they depend on the packages of the machine",
    "profiled_steps_are_run": "tests/train/test_profiler.py has it",
    "optimizer_is_installed": "it depends on the packages of the machine",
    "widths_have_rules": "tests/nn/test_mup.py has them",
    "padding_is_hidden": "every mixer of ours hides it",
    "padding_is_not_counted": "tests/train/test_padded_rows.py has them",
    "zero can be applied to the model": "tests/parallel/engine/test_deepspeed.py has it, where DeepSpeed is installed",
}
"""Requirement -> why no refusal of it is in the table."""


def test_every_requirement_has_a_refusal() -> None:
    """A step of the plan may check the settings alone, or the model alone."""
    covered = {requirement for requirement, _, _ in REFUSALS.values()}
    steps = {name.split(" can be ")[0] for name in covered if " can be " in name}
    names = {name for name in REQUIREMENTS.names if name.split(" can be ")[0] not in steps or name in WITHOUT}
    assert names - covered == set(WITHOUT)
