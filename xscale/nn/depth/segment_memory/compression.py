"""Rae et al. 2020 (Compressive Transformer), section 3: the oldest memories are compressed instead of dropped.

After each segment of T tokens the oldest T hidden states of memory and segment leave the memory, and a function maps c
of them to one slot of the compressed memory, whose own oldest slots are dropped. Queries read compressed memory, memory
and segment, in this order. The function is a mean, a maximum or a convolution with kernel and stride c; the convolution
is trained by the auto-encoding loss alone,

    L = || old - g(f(old)) ||^2,  g a map from one slot to c hidden states,

without a gradient to the hidden states (section 3.2).
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from xscale.core.config import Config, NonNegativeFloat, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import must_divide, take
from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.module import Module


class CompressionConfig(Config):
    slots: PositiveInt
    """Slots of the compressed memory."""
    rate: int = Field(default=3, ge=2)
    """c, tokens that one slot stands for."""
    function: Literal["mean", "max", "conv"] = "conv"
    """Function of c hidden states that makes a slot."""
    loss_weight: NonNegativeFloat = 1.0
    """Weight of the auto-encoding loss of the convolution, a mean over the hidden states that it compresses."""


class Compression(Module):
    """The function f of one block and, of a convolution, the map g back."""

    def __init__(self, config: CompressionConfig, dims: Dims) -> None:
        super().__init__()
        self.function, self.rate = config.function, config.rate
        self.weight = config.loss_weight
        self.encode: Linear | None = None
        self.decode: Linear | None = None
        if config.function == "conv":
            inputs = config.rate * dims.width
            self.encode = Linear(inputs, dims.width, ("width", "state"), dims.init, bias=True)
            self.decode = Linear.from_width(dims, inputs, "state", bias=True)

    def forward(self, old: Tensor) -> Tensor:
        """Compress hidden states [B, T, D] to slots [B, T / c, D]."""
        windows = old.reshape(len(old), -1, self.rate, old.shape[-1])  # [B, T / c, c, D]
        if self.function == "max":
            return windows.amax(2)
        if self.encode is None:
            return windows.mean(2)
        slots: Tensor = self.encode(windows.flatten(2))  # [B, T / c, D]
        return slots

    def reconstruction_loss(self, old: Tensor, slots: Tensor, is_text: Tensor) -> Tensor | None:
        """Mean squared error of the states [B, T, D] that g makes of slots [B, T / c, D], where a slot `is_text`
        [B, T / c]; None: nothing is trained."""
        if self.decode is None:
            return None
        # Over all slots, with or without text, so that the loss of a batch is the mean of those of its parts.
        states = old.reshape(*slots.shape[:2], -1)  # [B, T / c, c D]
        errors: Tensor = (self.decode(slots) - states).square().mean(2)
        return self.weight * errors.where(is_text, 0.0).mean()

    def documents(self, old: Tensor, empty: int) -> Tensor:
        """Return the documents [B, T / c] of the slots for those [B, T] of the states; `empty` of a slot of several."""
        windows = old.reshape(len(old), -1, self.rate)  # [B, T / c, c]
        is_one = (windows == windows[..., :1]).all(2)
        return torch.where(is_one, windows[..., 0], empty)


def compressions(config: CompressionConfig | None, dims: Dims) -> nn.ModuleDict:
    """Return the compression of each block, by its number; empty: there is none."""
    layers = range(dims.depth if config is not None else 0)
    return nn.ModuleDict(
        {str(layer): Compression(config, dims) for layer in layers if config is not None}
    )


def check_compression(
    config: CompressionConfig | None, eval_length: int | None, dims: Dims, path: str
) -> list[Problem]:
    """List why segments of `dims.length` tokens cannot be compressed so; `path` is that of the memory."""
    if config is None:
        return []
    where = f"{path}.compression"
    problems = must_divide(where, "rate", config.rate, "data.sequence_length", dims.length, least=2)
    if config.function == "conv" and not config.loss_weight:
        what = "the convolution is trained by this loss alone"
        choices = take(1.0) + take("mean", "max", key=f"{where}.function")
        problems.append(Problem(f"{where}.loss_weight", what, choices=choices))
    if eval_length is not None:
        what = "tokens leave a memory of one length for the compressed memory, in evaluation too"
        choices = take(None) + take(None, key=where)
        problems.append(Problem(f"{path}.eval_length", what, choices=choices))
    return problems
