"""Position-wise layers: x -> x."""

from xscale.nn.ffn import (
    ffn,
    product_key_memory,
    rwkv7_channel_mixing,
    separable_conv,
    sparse,
)
from xscale.nn.ffn.moe import moe

__all__ = [
    "ffn",
    "moe",
    "product_key_memory",
    "rwkv7_channel_mixing",
    "separable_conv",
    "sparse",
]
