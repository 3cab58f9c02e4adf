"""Every advice of every refusal in the table is followed: fewer problems are left, and never the one that it is for."""

import re

import pytest

from tests.requirements.refusals import REFUSALS, refused
from xscale.core.compose import compose_mapping
from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError, Problem
from xscale.core.yaml_reader import flow_text
from xscale.mesh import axes
from xscale.recipe import Recipe
from xscale.requirements.check import REQUIREMENTS, unsolved

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
    for problem in problems:
        assert problem.fix, problem
        overrides = [
            tuple(f"{key}={flow_text(value)}" for key, value in (*choice.edits, *choice.further))
            for choice in problem.choices
        ]
        if not problem.choices:
            # A sentence that is written by hand.
            overrides = [(text.rstrip("."),) for text in OVERRIDE.findall(problem.fix)]
        for edits in overrides:
            after = problems_of(followed(recipe, *edits))
            assert problem not in after, f"{edits} leaves {problem}"
            assert len(after) < len(problems), f"{edits} ends {problem}, and makes {after}"


@pytest.mark.parametrize("name", REFUSALS)
def test_the_requirement_of_the_table_speaks(name: str) -> None:
    recipe, world = refused(name)
    given = {"settings": recipe, "world": world, **{key: getattr(recipe, key) for key in Recipe.model_fields}}
    spoken = [requirement for requirement, problems in REQUIREMENTS.facts(given).problems().items() if problems]
    assert REFUSALS[name][0] in spoken
