"""Residual streams: how the sublayers of a stack read from the residual stream and write to it."""

from xscale.nn.residual import (
    admin,
    attention_residuals,
    gru_gate,
    hyper_connections,
    normless,
    norms,
    parallel,
    reversible,
)

__all__ = [
    "admin",
    "attention_residuals",
    "gru_gate",
    "hyper_connections",
    "normless",
    "norms",
    "parallel",
    "reversible",
]
