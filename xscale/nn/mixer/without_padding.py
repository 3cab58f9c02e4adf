"""Mixers that cannot hide tokens, on padded samples: those of one length go together, without their padding.

Each sample has the numbers that it has alone, whatever the mixer does along the sequence.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xscale.core.errors import ConfigError
from xscale.nn.attention.ops.without_padding import samples_by_length
from xscale.nn.compiling.eager import eager
from xscale.nn.tokens import Tokens

Forward = Callable[..., Tensor]


def without_padding(forward: Forward) -> Forward:
    """Decorate the forward of a mixer with the trait `padding`, x [B, T, D] -> [B, T, D]: it never sees padding."""

    @functools.wraps(forward)
    def call(self: Any, x: Tensor, tokens: Tokens, *more: Any, **edges: Any) -> Tensor:
        if tokens.padding is None or self.reads_padding:
            require_one_document(self.path, tokens)
            return forward(self, x, tokens, *more, **edges)
        assert not edges, "such a mixer hands nothing on to the next block"
        assert all(value is None for value in more), "such a mixer does no cross attention"
        return _each_length(functools.partial(forward, self), x, tokens)

    return call


def require_one_document(path: str, tokens: Tokens) -> None:
    """Raise ConfigError where the mixer at `path`, which cannot mask documents from each other, gets packed ones."""
    if tokens.documents is not None and tokens.padding is None:
        what = f"{path} cannot mask packed documents from each other"
        raise ConfigError(
            "data.cross_documents", what, "Set it to true, or take the mixer attention."
        )


@eager
def _each_length(forward: Forward, x: Tensor, tokens: Tokens) -> Tensor:
    y = torch.zeros_like(x)
    for length, rows in samples_by_length(tokens.sample_lengths()).items():
        index = torch.tensor(rows, device=x.device)
        out = forward(x[index, :length], tokens.without_padding(index, length))
        full = torch.zeros_like(x[index]).index_copy(1, torch.arange(length, device=x.device), out)
        y = y.index_copy(0, index, full)
    return y
