"""Position encodings."""

from xscale.nn.position import (
    alibi,
    deberta,
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
