"""The end of a branch: bias, dropout and the residual sum in one."""

from xscale_kernels.bias_dropout_residual.op import IMPLEMENTATIONS, bias_dropout_residual

__all__ = ["IMPLEMENTATIONS", "bias_dropout_residual"]
