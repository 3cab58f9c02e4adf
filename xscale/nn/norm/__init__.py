"""Norms: x -> x, by statistics of a token or of a batch."""

from xscale.nn.norm import batch_statistics
from xscale.nn.norm.norm import NORMS, Norm

__all__ = ["NORMS", "Norm", "batch_statistics"]
