"""Scores, top-k choice and places in the experts' buffers."""

from xscale_kernels.router.op import IMPLEMENTATIONS, route
from xscale_kernels.router.slots import slots

__all__ = ["IMPLEMENTATIONS", "route", "slots"]
