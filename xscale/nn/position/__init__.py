"""Position encodings."""

from xscale.nn.position import (
    alibi,
    gaussian,
    learned,
    music_transformer,
    position,
    relative,
    rope,
    shaw,
    transformer_xl,
)

__all__ = [
    "alibi",
    "gaussian",
    "learned",
    "music_transformer",
    "position",
    "relative",
    "rope",
    "shaw",
    "transformer_xl",
]
