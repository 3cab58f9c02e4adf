"""The check of a recipe: all facts and requirements, and the recipes that advised changes make."""

from collections.abc import Collection
from typing import TypeVar

from xscale.core.choices import Edit
from xscale.core.compose import compose_mapping
from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError, Problem
from xscale.core.requirements import SETTINGS, UNKNOWN, Facts, RequirementSet
from xscale.core.yaml_writer import flow_text
from xscale.mesh import axes
from xscale.requirements import (
    facts,
    frozen,
    layout,
    model,
    objective,
    optimizer,
    samples,
    streams,
    training,
)
from xscale.requirements.solver import solve
from xscale.settings.settings import Settings

SettingsT = TypeVar("SettingsT", bound=Settings)
SECTIONS = tuple(Settings.model_fields)


def check(settings: Settings, world: int, invalid: Collection[str] = ()) -> list[Problem]:
    """List every problem of a recipe on `world` ranks, each with the changes that would end it.

    What depends on a section in `invalid` is not checked.
    """

    def change(edits: tuple[Edit, ...]) -> Facts | None:
        other = changed(settings, edits)
        if other is None:
            return None
        return before.changed(_given(other, _world_of(settings, other, world), invalid))

    before = REQUIREMENTS.facts(_given(settings, world, invalid))
    return solve(before, change)


def changed(settings: SettingsT, edits: tuple[Edit, ...]) -> SettingsT | None:
    """Return the recipe with these edits, as overrides on the command line make them; None where one is refused."""
    try:
        composed = compose_mapping(
            encode(settings), [f"{key}={flow_text(value)}" for key, value in edits]
        )
        return None if composed.problems else decode(type(settings), composed.data)
    except ConfigError:
        return None


def _world_of(settings: Settings, other: Settings, world: int) -> int:
    """Return the ranks of a changed recipe: as many, or the fewest where these are the fewest now or no longer fit."""
    mesh = other.parallel.mesh
    is_fewest = world == axes.min_world_size(settings.parallel.mesh)
    return axes.min_world_size(mesh) if is_fewest or axes.check(mesh, world) else world


def _given(settings: Settings, world: int, invalid: Collection[str]) -> dict[str, object]:
    sections = {name: UNKNOWN if name in invalid else getattr(settings, name) for name in SECTIONS}
    return {**sections, SETTINGS: settings, "world": world}


def unsolved(settings: Settings, world: int) -> list[Problem]:
    """List every problem of a recipe with all its choices, of which none was tried."""
    problems = REQUIREMENTS.facts(_given(settings, world, ())).problems()
    return [problem for several in problems.values() for problem in several]


REQUIREMENTS = RequirementSet(
    (*SECTIONS, SETTINGS, "world"),
    (*facts.FACTS, *layout.FACTS, *objective.FACTS),
    (
        *model.REQUIREMENTS,
        *objective.REQUIREMENTS,
        *training.OF_THE_RUN,
        *optimizer.REQUIREMENTS,
        *frozen.REQUIREMENTS,
        *samples.REQUIREMENTS,
        *streams.REQUIREMENTS,
        training.tasks_can_be_evaluated,
        *layout.OF_STEPS,
        *layout.OF_DISTILLATION,
        layout.teachers_run(unsolved),
        *training.OF_THE_BATCH,
    ),
)
