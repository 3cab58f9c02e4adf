"""Segments of the tokens that a mixture routes: sequences, or capacity groups of consecutive tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xscale.nn.ffn.moe.text_tokens import TextTokens
from xscale.nn.tokens import Tokens


@dataclass(frozen=True)
class Segments:
    """N consecutive tokens cut into segments, each with some of them."""

    count: int
    length: int
    """Tokens of each segment but the last ones, which may have fewer or none."""
    lengths: tuple[int, ...] | None = None
    """Tokens of each segment, where they differ; None: `length`."""

    @staticmethod
    def even(tokens: int, count: int) -> "Segments":
        """`count` segments of N tokens: of one length if it divides them, or the last ones are shorter."""
        return Segments(count, -(-tokens // count))

    @staticmethod
    def of_lengths(lengths: Sequence[int]) -> "Segments":
        """Segments of these lengths; those of no token are left out."""
        some = tuple(length for length in lengths if length)
        return Segments(len(some), max(some), some)

    @property
    def is_one(self) -> bool:
        """Whether all tokens are of one segment."""
        return self.count == 1

    def sizes(self) -> int | list[int]:
        """Return the tokens of a segment, or of each where they differ."""
        return self.length if self.lengths is None else list(self.lengths)

    def of(self, token: Tensor) -> Tensor:
        """Return the segment [M] of each of M tokens by their indices."""
        if self.lengths is None:
            return token // self.length
        ends = torch.tensor(self.lengths, device=token.device).cumsum(0)
        return torch.searchsorted(ends, token, right=True)

    def divides(self, tokens: int) -> bool:
        """Whether each segment of N tokens has equally many."""
        return self.lengths is None and self.count * self.length == tokens


def sequences_of(tokens: Tokens) -> Segments:
    """Return the sequences of a micro-batch, each a segment: those of its text, where padding is not routed."""
    if isinstance(tokens, TextTokens):
        return Segments.of_lengths(tokens.lengths)
    return Segments.even(tokens.ids.numel(), len(tokens.ids))
