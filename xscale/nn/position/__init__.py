"""Position encodings."""

from xscale.nn.position import (
    alibi,
    deberta,
    floater,
    gaussian,
    learned,
    music_transformer,
    position,
    relative,
    rope,
    shaw,
    transformer_xl,
    tupe,
)

__all__ = [
    "alibi",
    "deberta",
    "floater",
    "gaussian",
    "learned",
    "music_transformer",
    "position",
    "relative",
    "rope",
    "shaw",
    "transformer_xl",
    "tupe",
]
