"""xscale: distributed training of sparse Transformers. Importing it imports nothing heavy."""

from xscale.api import build_model, load_model, load_recipe, train

__version__ = "0.1.0"

__all__ = ["__version__", "build_model", "load_model", "load_recipe", "train"]
