"""Rows to the experts and back: gather by assignment, and the weighted sum that undoes it."""

from xscale_kernels.permute.op import IMPLEMENTATIONS, permute, unpermute

__all__ = ["IMPLEMENTATIONS", "permute", "unpermute"]
