"""Softmax attention within the documents of packed sequences."""

from xscale_kernels.packed_attention.op import IMPLEMENTATIONS, packed_attention

__all__ = ["IMPLEMENTATIONS", "packed_attention"]
