"""Modules that read a fixed number of tokens before and after each token: convolutions, and RWKV's token shift.

Generation keeps the last `left` inputs. The seam `with_neighbours` is all that a sequence sharded over ranks needs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.nn.axes import Axis
from xscale.nn.init import Init
from xscale.nn.module import Module
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


class NeighbourReader(Module):
    """A module whose output for a token depends on a few tokens around it."""

    seams = {"with_neighbours": Role.NEIGHBOURS}
    left: int
    """Tokens that are read before each token."""
    right: int = 0
    """Tokens that are read after each token."""
    sharded_over_tp: bool = True
    """Whether each rank of tensor parallelism reads a part of the channels."""

    def why_not_static(self) -> str | None:
        return "it keeps the inputs of the tokens before, in a new tensor after each"

    def with_neighbours(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor | None]:
        """Prepend `left` and append `right` neighbours: x [B, T, C] -> [B, left + T + right, C] and their documents.

        Beyond the ends of the sequence there are zeros, in document -1. The documents [B, left + T + right] are None if
        the tokens have none. A seam: where the sequence is sharded, neighbours are on other ranks. In generation x are
        the new tokens, and those before them come from the forward's cache.
        """
        past = x.new_zeros(len(x), self.left, x.shape[2])
        if tokens.forward.cache is not None:
            past = tokens.forward.cache.get(self.path, past)
            tokens.forward.cache[self.path] = (
                torch.cat((past, x), 1).narrow(1, x.shape[1], self.left).clone()
            )
        documents = tokens.documents
        if documents is not None:
            documents = F.pad(documents, (self.left, self.right), value=-1)
        return F.pad(torch.cat((past, x), 1), (0, 0, 0, self.right)), documents

    @property
    def exchanged_width(self) -> int:
        """C of all ranks: the channels of a token that its neighbours read."""
        raise NotImplementedError


def same_document(documents: Tensor, left: int, right: int) -> Tensor:
    """Documents [B, left + T + right] of tokens with neighbours -> [B, T, left + 1 + right], true where one is read."""
    windows = documents.unfold(1, left + 1 + right, 1)  # [B, T, left + 1 + right]
    return windows == windows[..., left : left + 1]


class TokenShift(NeighbourReader):
    """The token before each token, [B, T, D]; zeros before the first one of a document (Peng et al. 2023, 3.1.1)."""

    left = 1
    sharded_over_tp = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        near, documents = self.with_neighbours(x, tokens)  # [B, 1 + T, D]
        before = near.narrow(1, 0, x.shape[1])
        return before if documents is None else before * same_document(documents, 1, 0)[..., :1]

    @property
    def exchanged_width(self) -> int:
        return self.width


class DepthwiseConvolution(NeighbourReader):
    """A kernel of `size` numbers for each of C channels, [B, T, C] -> [B, T, C], over the tokens of a document.

    y_t = sum_(j=0)^(k-1) w_j x_(t - left + j) + b: the last j reads the token itself, or `right` tokens after it.
    """

    weight: Parameter

    def __init__(
        self, channels: int, axis: Axis, size: int, *, bias: bool = False, right: int = 0
    ) -> None:
        super().__init__()
        self.left, self.right = size - 1 - right, right
        self.sharded_over_tp = axis in ("heads", "ffn")
        init = Init("uniform", bounds=(-(size**-0.5), size**-0.5))
        self.declare("weight", (channels, size), (axis, "tokens"), init)
        self.bias: Tensor | None
        if bias:
            self.declare("bias", (channels,), (axis,), init, decays=False)
        else:
            self.bias = None

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Convolve x [B, T, C]."""
        near, documents = self.with_neighbours(x, tokens)  # [B, left + T + right, C]
        weight, length = self.use(self.weight), x.shape[1]
        window = None if documents is None else same_document(documents, self.left, self.right)
        y = None if self.bias is None else self.use(self.bias)
        for step in range(self.left + 1 + self.right):
            term = near.narrow(1, step, length) * weight[:, step]
            if window is not None:
                term = term * window[..., step, None]
            y = term if y is None else y + term
        assert y is not None
        return y

    @property
    def exchanged_width(self) -> int:
        return len(self.weight)
