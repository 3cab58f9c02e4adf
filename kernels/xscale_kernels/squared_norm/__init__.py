"""The squared length of many tensors together."""

from xscale_kernels.squared_norm.op import IMPLEMENTATIONS, squared_norm

__all__ = ["IMPLEMENTATIONS", "squared_norm"]
