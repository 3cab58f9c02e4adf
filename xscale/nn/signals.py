"""Axes of what travels beside the hidden states, by which one function maps, shards, pools and cuts all of it; signals.

A signal is what one part alone reads beside the hidden states, such as the ends of masked spans. Its part declares it,
whoever makes a batch or calls the model gives it a value, and the tokens carry that under the part's key.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch.nn.functional as F
from torch import Tensor

T = TypeVar("T")

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
    """Whether values are indices of tokens of the text; a shard counts them from its global tokens on."""

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


@dataclass(frozen=True)
class Signal(Generic[T]):
    """Input of a part beside the hidden states: a tensor with axes, or a value of the whole forward, of type T."""

    key: str
    """The part's file within `xscale.nn`, or a name for a plugin's part, and the signal's name: "gates.budgets"."""
    axes: TokenAxes | None = None
    """Axes of the tensor, by which it is mapped and sharded as the tokens are; None: it belongs to no token."""


FORMER_FIELDS = {
    "boundaries": "xscale.nn.head.boundary_head.BOUNDARIES",
    "content": "xscale.nn.depth.edges.CONTENT",
    "early_exit": "xscale.nn.depth.early_exit.EARLY_EXIT",
    "gating": "xscale.nn.depth.gates.BUDGETS",
    "labels": "xscale.nn.head.pooler.LABELS",
    "observed": "xscale.nn.attention.ops.mask.OBSERVED",
    "only_last_logits": "xscale.nn.head.head.ONLY_LAST_LOGITS",
    "predictions": "xscale.nn.head.class_head.PREDICTIONS",
    "sentence_globals": "xscale.nn.head.sentence_contrast.SENTENCE_GLOBALS",
    "sentence_weight": "xscale.nn.head.sentence_contrast.SENTENCE_WEIGHT",
    "sentences": "xscale.nn.head.sentence_contrast.SENTENCES",
}
"""Fields that `Tokens` had before their parts declared them, for the sentence that tells a plugin the new place."""


def former_field(name: str) -> str | None:
    """Say where a former field of `Tokens` is; None: it was none."""
    path = FORMER_FIELDS.get(name)
    if path is None:
        return None
    module, _, signal = path.rpartition(".")
    return (
        f"`{name}` is a signal of its part now: tokens.get({signal}), with {signal} from {module}"
    )
