"""The output projection and the loss in one, without the logits."""

from xscale_kernels.linear_cross_entropy.op import IMPLEMENTATIONS, linear_cross_entropy

__all__ = ["IMPLEMENTATIONS", "linear_cross_entropy"]
