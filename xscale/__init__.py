"""xscale: distributed training of sparse Transformers. Importing it imports nothing heavy."""

import sys

from xscale.api import build_model, load_model, load_recipe, train
from xscale.core.moved_modules import MovedModules, MovedNames
from xscale.core.version import __version__

__all__ = ["__version__", "build_model", "load_model", "load_recipe", "train"]

sys.meta_path.insert(0, MovedNames())
sys.meta_path.append(MovedModules())
