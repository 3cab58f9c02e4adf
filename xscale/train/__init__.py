"""Training: setup, the loop and what is due between its steps, stop and resume; `xscale.train(recipe)` is callable.

Python sets the attribute `xscale.train` to this package when it is imported, in place of the function of that name.
"""

import sys
from types import ModuleType
from typing import Any


def run_recipe(recipe: Any, data: Any = None) -> int:
    """Train a Recipe, as `xscale.api.train` says."""
    from xscale.train.run import check_and_train

    section = recipe.data.model_copy(
        update={"from_caller": data is not None or recipe.data.from_caller}
    )
    recipe = recipe.model_copy(update={"data": section})
    return check_and_train(recipe, recipe.check, data)


class _TrainPackage(ModuleType):
    def __call__(self, recipe: Any, data: Any = None) -> int:
        """Train a Recipe, as `xscale.api.train` does."""
        return run_recipe(recipe, data)


sys.modules[__name__].__class__ = _TrainPackage
