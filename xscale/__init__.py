"""xscale: distributed training of sparse Transformers. Importing it imports nothing heavy."""

from xscale.api import build_model, load_model, load_recipe, train
from xscale.core.version import __version__

__all__ = ["__version__", "build_model", "load_model", "load_recipe", "train"]
