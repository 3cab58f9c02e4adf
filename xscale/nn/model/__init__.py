"""Whole models: token ids to logits or to the loss."""

from xscale.nn.model import (
    decoder,
    disentangled,
    encoder,
    encoder_decoder,
)

__all__ = [
    "decoder",
    "disentangled",
    "encoder",
    "encoder_decoder",
]
