"""Patterns: which key blocks a query block sees. A pattern is data; the core `block_sparse` computes any of them."""

from xscale.nn.pattern import (
    axial,
    bigbird,
    block_local,
    fixed,
    global_blocks,
    image_1d,
    longformer,
    multi_scale,
    random,
    union,
    variable,
    window,
)

__all__ = [
    "axial",
    "bigbird",
    "block_local",
    "fixed",
    "global_blocks",
    "image_1d",
    "longformer",
    "multi_scale",
    "random",
    "union",
    "variable",
    "window",
]
