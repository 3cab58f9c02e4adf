"""Axes of what travels beside the hidden states, by which one function maps, shards, pools and cuts all of it."""

from collections.abc import Collection
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

TOKENS = "tokens"
"""Tokens of the sequence as the blocks read it: global tokens stand before them, poolings shorten them, and ranks of
cp and tp have shards of them."""
KEYS = "keys"
"""Tokens of the sequence that others attend to: as `TOKENS`, of which every rank has all."""
TARGETS = "targets"
"""Tokens of the text as the head predicts them: without global tokens, and never pooled; ranks of cp have shards."""
BATCH = "batch"
"""Sequences of the micro-batch."""


@dataclass(frozen=True)
class TokenAxes:
    """Names of a tensor's axes, in their order; any other name than those above is an axis that nothing cuts."""

    names: tuple[str, ...]
    fill: int = 0
    """Value at the padding that a shard of the sequence ends in."""
    counts_tokens: bool = False
    """Whether values are indices of tokens of the text, which global tokens before it shift."""

    def dim(self, name: str) -> int | None:
        """Return the number of the axis with this name; None: there is none."""
        return self.names.index(name) if name in self.names else None

    def select(self, value: Tensor, axes: Collection[str], index: Tensor | slice) -> Tensor:
        """Return the elements `index` along those of `axes` that the tensor has."""
        for dim, name in enumerate(self.names):
            if name in axes:
                value = value[(slice(None),) * dim + (index,)]
        return value

    def prepend(self, value: Tensor, axes: Collection[str], count: int) -> Tensor:
        """Return the tensor with `count` zeros before its elements, along those of `axes` that it has."""
        for dim, name in enumerate(self.names):
            if name in axes:
                value = F.pad(value, (0, 0) * (value.dim() - dim - 1) + (count, 0))
        return value


def axes(*names: str, fill: int = 0, counts_tokens: bool = False) -> dict[str, TokenAxes]:
    """Return the metadata of a dataclass' field that declare its axes."""
    return {"axes": TokenAxes(names, fill, counts_tokens)}
