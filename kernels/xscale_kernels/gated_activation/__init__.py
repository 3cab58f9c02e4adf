"""Gated linear units."""

from xscale_kernels.gated_activation.op import IMPLEMENTATIONS, gated_activation
from xscale_kernels.gated_activation.reference import KINDS

__all__ = ["IMPLEMENTATIONS", "KINDS", "gated_activation"]
