"""Softmax attention within the documents of packed sequences."""

from xscale_kernels.packed_attention.op import (
    COMPILED,
    IMPLEMENTATIONS,
    library_refusals,
    packed_attention,
    runs_compiled,
)
from xscale_kernels.packed_attention.spans import DocumentSpans, find_document_spans

__all__ = [
    "COMPILED",
    "IMPLEMENTATIONS",
    "DocumentSpans",
    "find_document_spans",
    "library_refusals",
    "packed_attention",
    "runs_compiled",
]
