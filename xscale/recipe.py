"""A recipe: the config of one whole run, checked before any process or GPU starts."""

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from xscale.core.compose import COMMAND_LINE, Composed, compose, leaves
from xscale.core.config import decode, encode
from xscale.core.config_keys.override_path import is_index
from xscale.core.errors import ConfigError, Problem
from xscale.core.plugins import import_plugins, plugin_names
from xscale.core.requirements import at_most, take
from xscale.core.yaml_writer import flow_text
from xscale.mesh import axes
from xscale.nn.mixer.mixer import MIXERS
from xscale.nn.position.position import POSITIONS
from xscale.optim.schedule import fitting_warmup
from xscale.requirements.check import check, unsolved
from xscale.requirements.model import model_fits_itself
from xscale.requirements.unchosen import name_unchosen
from xscale.settings.settings import Settings

LISTED = 8
"""At most so many values are listed in a warning."""


class Recipe(Settings):
    """The settings of a run, and their check."""

    def check(self, world: int = 1, invalid: Collection[str] = ()) -> list[Problem]:
        """List every problem on `world` ranks, each with what would work; needs no device and no data.

        What depends on a section in `invalid`, which has its defaults because its values were refused, is not checked.
        """
        return check(self, world, invalid)

    def is_valid(self, world: int = 1) -> bool:
        """Whether `check` lists no problem on `world` ranks. It is quicker: nothing is tried for advice."""
        return not unsolved(self, world)

    def warnings(self) -> list[Problem]:
        """List values that are possible and seldom meant."""
        problems: list[Problem] = []
        steps, warmup = self.train.steps, self.schedule.warmup_steps
        if warmup >= steps > 1:
            what = f"the warm-up of {warmup} steps is not shorter than train.steps={steps}: the rate only rises"
            longer = take(2 * warmup, key="train.steps")
            problems.append(at_most("schedule.warmup_steps", what, steps - 1, *longer))
        problems += _unused_position(self)
        if self.optimizer.lr == 0:
            problems.append(Problem("optimizer.lr", "the learning rate is 0: no weight changes"))
        return problems

    def check_model_config(self) -> list[Problem]:
        """List the problems of the section `model` by itself."""
        return model_fits_itself(self.model, self.data)


def _unused_position(settings: Settings) -> list[Problem]:
    """Warn of a position encoding inside attention in a model of which no layer has any."""
    model: Any = settings.model
    position = model.position
    stacks = [
        getattr(model, name) for name in ("stack", "encoder", "decoder") if hasattr(model, name)
    ]
    mixers = [mixer for stack in stacks for mixer in stack.mixers()]
    if POSITIONS.of(position).traits.where in ("none", "input") or any(
        MIXERS.of(mixer).part.uses_position for mixer in mixers
    ):
        return []
    kinds = ", ".join(dict.fromkeys(f"'{mixer.kind}'" for mixer in mixers))
    what = f"'{position.kind}' acts inside attention, and the model has none ({kinds}): it has no effect"
    on_embeddings = take("learned", "sinusoidal", "none")
    return [Problem("model.position", what, choices=on_embeddings)]


def read(file: Path, overrides: list[str]) -> tuple[Recipe, Composed]:
    """Compose and validate a config; a ConfigError lists every problem. Plugins are imported first."""
    composed = compose(file, overrides)
    return decode_recipe(composed), composed


def decode_recipe(composed: Composed) -> Recipe:
    """Validate a composed config; a ConfigError lists every problem. Plugins are imported first."""
    if problems := _load_plugins(composed):
        raise ConfigError(problems)
    return _with_fitting_warmup(decode(Recipe, composed.data, composed.origin), composed)


def _with_fitting_warmup(recipe: Recipe, composed: Composed) -> Recipe:
    """The recipe with a warm-up that fits where an override shortened the run, and none sets the warm-up.

    `composed.fitted` then says so, and so does the origin of the value. A file that has both is its author's choice.
    """
    key, origin = "schedule.warmup_steps", composed.origin
    before, steps = recipe.schedule.warmup_steps, recipe.train.steps
    now = fitting_warmup(before, steps)
    if (
        now == before
        or origin.get("train.steps") != COMMAND_LINE
        or origin.get(key) == COMMAND_LINE
    ):
        return recipe
    origin[key] = f"fits train.steps={steps}, in place of {before}"
    what = f"the warm-up of {before} steps does not fit train.steps={steps}"
    composed.fitted[key] = f"{what} and is shortened: {key}={now}"
    schedule = recipe.schedule.model_copy(update={"warmup_steps": now})
    return recipe.model_copy(update={"schedule": schedule})


def dropped_values(recipe: Recipe, composed: Composed) -> list[Problem]:
    """List the overrides of a kind that drop values of the files for which the new part has a key too."""
    current, origin = encode(recipe), composed.origin
    problems = []
    for path, old in composed.replaced.items():
        lost = [
            f"{key}={flow_text(value)}"
            for key, value in leaves(old, path)
            if key != f"{path}.kind"
            and origin.get(key) != COMMAND_LINE
            and _changed(current, key, value)
        ]
        if lost:
            values = ", ".join(lost[:LISTED]) + (
                f" and {len(lost) - LISTED} more" if len(lost) > LISTED else ""
            )
            what = f"another kind replaces the whole section, so that these values are dropped: {values}"
            problems.append(
                Problem(f"{path}.kind", what, "Give those that you want to keep, as overrides.")
            )
    return problems


def _changed(data: Any, path: str, value: Any) -> bool:
    """Whether `data` has a key at the dotted path, with another value."""
    for name in path.split("."):
        if isinstance(data, list) and is_index(name) and int(name) < len(data):
            data = data[int(name)]
            continue
        if not isinstance(data, dict) or name not in data:
            return False
        data = data[name]
    return bool(data != value and not (isinstance(data, dict) and data.get("kind") == value))


def read_and_check(
    composed: Composed,
    world: int | None = None,
    check_machine: Callable[[Recipe, Collection[str]], list[Problem]] | None = None,
) -> tuple[Recipe, int]:
    """Validate a config and check it on `world` ranks (None: the fewest that fit); a ConfigError lists all problems.

    These are the overrides that cannot be read, the values that are refused, what `Recipe.check` finds in the other
    sections, and what `check_machine` returns: it gets the recipe and the sections whose values were refused. With
    several ranks it is asked only if there are other problems, because each rank must come to the same result.
    """
    problems = [*composed.problems, *_load_plugins(composed)]
    if len(problems) > len(composed.problems):
        # Parts of a missing plugin would look like misspelt ones; one that breaks a promise is no part.
        raise ConfigError(problems)
    invalid: frozenset[str] = frozenset()
    try:
        recipe = _with_fitting_warmup(decode(Recipe, composed.data, composed.origin), composed)
    except ConfigError as error:
        problems += error.problems
        invalid = frozenset(re.split(r"[. ]", problem.path)[0] for problem in error.problems)
        valid = {key: value for key, value in composed.data.items() if key not in invalid}
        try:
            recipe = _with_fitting_warmup(decode(Recipe, valid, composed.origin), composed)
        except ConfigError:
            # There are more problems than are listed, so that some of the other sections have one too.
            raise ConfigError(problems) from None
    if world is None:
        world = axes.min_world_size(recipe.parallel.mesh)
    problems += name_unchosen(recipe.check(world, invalid), composed)
    if check_machine is not None and (problems or world == 1):
        problems += check_machine(recipe, invalid)
    if problems:
        raise ConfigError(problems)
    return recipe, world


def _load_plugins(composed: Composed) -> list[Problem]:
    """Import the plugins that a config names; list those that cannot be imported, and parts that break a promise."""
    names = plugin_names(composed.data)
    folders = dict.fromkeys(file.parent for file in composed.files)
    problems = import_plugins(names, folders)
    if names and not problems:
        from xscale.conformance.run import broken_promises

        problems = broken_promises(names)
    return problems
