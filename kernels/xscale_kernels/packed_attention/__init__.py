"""Softmax attention within the documents of packed sequences."""

from xscale_kernels.packed_attention.op import IMPLEMENTATIONS, library_refusals, packed_attention
from xscale_kernels.packed_attention.spans import DocumentSpans, find_document_spans

__all__ = ["IMPLEMENTATIONS", "DocumentSpans", "find_document_spans", "library_refusals", "packed_attention"]
