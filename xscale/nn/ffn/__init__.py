"""Position-wise layers: x -> x."""

from xscale.nn.ffn import (
    ffn,
    moe,
    product_key_memory,
    rwkv7_channel_mixing,
    sparse,
)

__all__ = [
    "ffn",
    "moe",
    "product_key_memory",
    "rwkv7_channel_mixing",
    "sparse",
]
