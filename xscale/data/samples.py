"""A batch as the loader gives it: tokens, the document each belongs to, and which samples they are."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Samples:
    """B samples of T + 1 tokens: the last T are the targets of the first T."""

    tokens: Tensor
    """[B, T+1] int64."""
    documents: Tensor
    """[B, T+1] int64: 0, 1, 2, ... within each sample; an end-of-document token belongs to the document it ends."""
    index: Tensor
    """[B] int64: the number of each sample in the run."""

    def __len__(self) -> int:
        return self.tokens.shape[0]
