"""Modules that read a fixed number of tokens before and after each token, and the token shift of RWKV.

Generation keeps the last `left` inputs. The seam `with_neighbours` is all that a sequence sharded over ranks needs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

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
