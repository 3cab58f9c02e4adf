"""Benchmarks of fused operators, whose cases stand beside each operator, in `xscale_kernels.OPERATOR.cases`."""
