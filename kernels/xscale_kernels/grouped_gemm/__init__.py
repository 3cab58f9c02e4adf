"""One matrix product for each group of rows, as the experts of a mixture need."""

from xscale_kernels.grouped_gemm.op import IMPLEMENTATIONS, grouped_gemm

__all__ = ["IMPLEMENTATIONS", "grouped_gemm"]
