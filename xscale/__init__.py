"""xscale: distributed training of sparse Transformers. Importing it imports nothing heavy."""

__version__ = "0.1.0"
