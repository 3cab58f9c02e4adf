"""The Python interface: read a recipe, build or load its model, train. Nothing heavy is imported before it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xscale.recipe import Recipe
    from xscale.text_model import TextModel


def load_recipe(config: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe: a YAML file, the name of one (`xscale list recipes`), or a mapping of its keys.

    `overrides` are those of the command line, such as `model.stack.depth=4`. In a mapping `use` names configs, as in a
    file. ConfigError lists every problem of the config, on the fewest ranks that its layout needs.
    """
    _before_torch()
    from xscale.commands.show.recipes import config_file
    from xscale.core.compose import compose_leniently, compose_mapping
    from xscale.recipe import read_and_check

    if isinstance(config, Mapping):
        composed = compose_mapping(dict(config), list(overrides))
    else:
        composed = compose_leniently(config_file(config), list(overrides))
    recipe, _ = read_and_check(composed)
    return recipe


def build_model(recipe: Recipe, vocabulary: int | None = None) -> TextModel:
    """Build the model of a recipe on this process, with the initial weights of `run.seed`.

    They are those that a run of the recipe begins with, on every layout. `vocabulary`: the number of token ids; None:
    that of the recipe's tokenizer config.
    """
    _before_torch()
    from xscale.text_model import TextModel

    return TextModel.built(recipe, vocabulary)


def load_model(folder: str | Path, *, plugins: bool = False) -> TextModel:
    """Load a model and its tokenizer from a run's folder (the newest good checkpoint), or from one of its checkpoints.

    The checkpoint may be of any layout. `plugins`: import the modules that the run's config names. ConfigError where
    there is no run or no checkpoint.
    """
    _before_torch()
    from xscale.text_model import TextModel

    return TextModel.loaded(Path(folder), plugins=plugins)


def train(recipe: Recipe) -> int:
    """Train a recipe in this process, or as a rank of a job; a run whose folder has checkpoints resumes.

    Returns the exit status: 0 done, 75 stopped on purpose and resumable. ConfigError lists what this machine lacks. A
    script may call it without a main guard.
    """
    _before_torch()
    from xscale.train.run import check_and_train

    return check_and_train(recipe, recipe.check)


def _before_torch() -> None:
    """Set what torch's libraries read when they are loaded; nothing where the caller has imported torch."""
    from xscale.mesh.environment import wait_passively

    wait_passively()
