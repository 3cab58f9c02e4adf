"""The softmax loss of logits that exist."""

from xscale_kernels.cross_entropy.op import IMPLEMENTATIONS, cross_entropy
from xscale_kernels.cross_entropy.terms import Terms

__all__ = ["IMPLEMENTATIONS", "Terms", "cross_entropy"]
