"""Generation by a model that keeps a state between segments: a text of any length, a segment at a time."""

from typing import Any

import torch
from torch import Tensor, nn

from xscale.nn.forward import Forward
from xscale.nn.head.head import ONLY_LAST_LOGITS
from xscale.nn.module import carried_tensors
from xscale.nn.segment_state import SEGMENT_STATE, SegmentStates
from xscale.nn.signals import Signal
from xscale.nn.tokens import Tokens


class SegmentDecoder:
    """The mixers keep keys and values of the present segment, which begin with those of the memory; a segment that is
    full is read once more as a whole, as in training, and its state is that of the next one."""

    def __init__(self, model: nn.Module, segment: int, *, incremental: bool) -> None:
        """`segment`: tokens of a segment in training. `incremental`: whether every mixer decodes over a cache."""
        self.model, self.segment = model, segment
        first = next(model.parameters())
        self.states = SegmentStates(
            carried_tensors(model), 1, dtype=first.dtype, device=first.device
        )
        self.cache: dict[str, Any] | None = {} if incremental else None
        self.begin = self.done = 0

    def next_logits(self, ids: Tensor) -> Tensor:
        """Return the logits [V] of the token after ids [T]: at the first call the prompt, then one more at each."""
        while len(ids) - self.begin > self.segment:
            self._forward(ids[: self.begin + self.segment], self.begin, None)
            self.states.commit()
            self.begin += self.segment
            self.done = self.begin
            self.cache = None if self.cache is None else {}
        first = self.begin if self.cache is None else self.done
        logits = self._forward(ids, first, self.cache)
        self.states.drop_pending()
        self.done = len(ids)
        return logits[0, -1]

    def _forward(self, ids: Tensor, first: int, cache: dict[str, Any] | None) -> Tensor:
        """Read the tokens from `first` on, of a text that ends in the present segment; return the last logits."""
        positions = torch.arange(first, len(ids), device=ids.device)[None] - self.begin
        tokens = Tokens(ids[None, first:], positions, forward=Forward(cache=cache))
        signals: dict[Signal[Any], Any] = {SEGMENT_STATE: self.states.of_rows(0, 1)}
        signals[ONLY_LAST_LOGITS] = True
        logits: Tensor = self.model(tokens.with_signals(signals))
        return logits
