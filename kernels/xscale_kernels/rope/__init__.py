"""Rotary position embedding."""

from xscale_kernels.rope.op import IMPLEMENTATIONS, rope

__all__ = ["IMPLEMENTATIONS", "rope"]
