"""Training: setup, the loop and what is due between its steps, stop and resume; `xscale.train(recipe)` is callable.

Python sets the attribute `xscale.train` to this package when it is imported, in place of the function of that name.
"""

import sys
from types import ModuleType
from typing import Any


class _TrainPackage(ModuleType):
    def __call__(self, recipe: Any) -> int:
        """Train a Recipe, as `xscale.api.train` does."""
        from xscale.train.run import check_and_train

        return check_and_train(recipe, recipe.check)


sys.modules[__name__].__class__ = _TrainPackage
