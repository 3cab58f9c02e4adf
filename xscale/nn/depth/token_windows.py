"""Windows of two tokens, their states, and the distilling of Informer: what `sequence_pooling` does to a sequence."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.module import Module
from xscale.nn.norm.norm import NORMS, Norm
from xscale.nn.signals import KEYS, TOKENS
from xscale.nn.tokens import SharedValues, Tokens


@dataclass(frozen=True)
class TokenWindows:
    """Windows of T tokens: T' = ceil(T / 2) of them, or 1 + ceil((T - 1) / 2) if the first token is one of its own.

    A window has the document of its first token, and a second token of another document is not in it.
    """

    first: Tensor
    """[T'] index of the first token of each window."""
    of: Tensor
    """[T] window of each token."""

    @staticmethod
    def split(length: int, device: torch.device, *, separate_first: bool) -> "TokenWindows":
        """Split `length` tokens into windows of two."""
        before = int(separate_first)
        of = (torch.arange(length, device=device) + before) // 2  # [T]
        first = torch.arange(0, length + before, 2, device=device) - before  # [T']
        return TokenWindows(first.clamp(min=0), of)

    def window_tokens(self, tokens: Tokens) -> Tokens:
        """Tokens [B, T] -> those of the windows [B, T'], with the fields of the first token of each."""
        return tokens.map_fields(
            lambda value, about: about.select(value, (TOKENS, KEYS), self.first),
            pooled_from=tokens.pooled_from or len(self.of),
            shared_values=SharedValues(),
        )

    def pool(self, x: Tensor, tokens: Tokens, method: str) -> Tensor:
        """Mean or maximum of x [B, T, D] over each window: [B, T', D]."""
        second = (self.first + 1).clamp(max=len(self.of) - 1)
        has_second = (self.of[second] == self.of[self.first]) & (second != self.first)  # [T']
        has_second = has_second.expand(len(x), -1)
        if tokens.documents is not None:
            has_second = has_second & (
                tokens.documents[:, second] == tokens.documents[:, self.first]
            )
        first_state, second_state = x[:, self.first], x[:, second]  # [B, T', D]
        both = (
            (first_state + second_state) / 2
            if method == "mean"
            else torch.maximum(first_state, second_state)
        )
        return torch.where(has_second[..., None], both, first_state)


class Distilling(Module):
    """MaxPool(ELU(norm(Conv1d(x)))) of three tokens each, with stride 2: [B, T, D] -> [B, ceil(T / 2), D].

    Tokens beyond the ends of a document are zeros for the convolution, and the maximum leaves them out.
    """

    def __init__(self, dims: Dims, norm: Norm.Config | None) -> None:
        super().__init__()
        self.conv = Linear(3 * dims.width, dims.width, ("state", "width"), dims.init, bias=True)
        """Weights of the token before, the token itself and the one after, in this order along the input."""
        self.norm: Norm | None = None if norm is None else NORMS.build(norm, dims.width)

    def forward(self, x: Tensor, tokens: Tokens, windows: TokenWindows) -> Tensor:
        before, after = _in_document(tokens, x)
        near = (_shift(x, 1).masked_fill(~before, 0.0), x, _shift(x, -1).masked_fill(~after, 0.0))
        y = self.conv(torch.cat(near, -1))  # [B, T, D]
        if self.norm is not None:
            y = self.norm(y, tokens)
        y = F.elu(y)
        lowest = torch.finfo(y.dtype).min
        highest = torch.maximum(_shift(y, 1).masked_fill(~before, lowest), y)
        highest = torch.maximum(highest, _shift(y, -1).masked_fill(~after, lowest))
        return highest[:, windows.first]


def _shift(x: Tensor, by: int) -> Tensor:
    """Return x [B, T, D] with the token `by` places before at each place; beyond the ends there are zeros."""
    return F.pad(x, (0, 0, by, 0))[:, :-by] if by > 0 else F.pad(x, (0, 0, 0, -by))[:, -by:]


def _in_document(tokens: Tokens, x: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the tokens before and after each token are of its document: two of [B, T, 1]."""
    documents = tokens.documents
    documents = torch.zeros_like(tokens.ids) if documents is None else documents
    same = documents[:, 1:] == documents[:, :-1]  # [B, T - 1]
    return F.pad(same, (1, 0))[..., None], F.pad(same, (0, 1))[..., None]
