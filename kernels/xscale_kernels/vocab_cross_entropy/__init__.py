"""The local parts of a loss whose vocabulary is spread over ranks."""

from xscale_kernels.vocab_cross_entropy.op import (
    IMPLEMENTATIONS,
    Statistics,
    vocab_gradients,
    vocab_loss,
    vocab_statistics,
)

__all__ = ["IMPLEMENTATIONS", "Statistics", "vocab_gradients", "vocab_loss", "vocab_statistics"]
