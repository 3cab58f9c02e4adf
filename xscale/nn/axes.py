"""The names of the dimensions of parameters and of random draws."""

from typing import Literal, get_args

Axis = Literal[
    "vocab", "heads", "kv_heads", "ffn", "experts", "width", "depth", "tokens", "batch", "state"
]
"""Meaning of a dimension of a parameter. Closed: a plan maps each of these to a mesh axis, or to none."""
AXES: tuple[str, ...] = get_args(Axis)
