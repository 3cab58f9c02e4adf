"""Residual streams: how the sublayers of a stack read from the residual stream and write to it."""

from xscale.nn.residual import (
    admin,
    hyper_connections,
    normless,
    norms,
    parallel,
    reversible,
)

__all__ = [
    "admin",
    "hyper_connections",
    "normless",
    "norms",
    "parallel",
    "reversible",
]
