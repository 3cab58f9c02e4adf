"""Rows scaled to unit root mean square."""

from xscale_kernels.rmsnorm.op import IMPLEMENTATIONS, rmsnorm

__all__ = ["IMPLEMENTATIONS", "rmsnorm"]
