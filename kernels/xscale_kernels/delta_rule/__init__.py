"""The delta rule, with and without decay, as a chunked scan."""

from xscale_kernels.delta_rule.op import IMPLEMENTATIONS, delta_rule

__all__ = ["IMPLEMENTATIONS", "delta_rule"]
