"""The linear map and the token embedding, with named axes."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.nn.init import ZEROS, Init
from xscale.nn.module import Axis, Module


class Linear(Module):
    """y = x W^T + b, the weight cast and localised by the door."""

    weight: Parameter

    def __init__(self, inputs: int, outputs: int, axes: tuple[Axis, Axis], init: Init, *, bias: bool = False) -> None:
        """`axes` names the weight's dims: (outputs, inputs)."""
        super().__init__()
        self.declare("weight", (outputs, inputs), axes, init)
        self.bias: Tensor | None
        if bias:
            self.declare("bias", (outputs,), axes[:1], ZEROS)
        else:
            self.register_parameter("bias", None)
        self.multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        """From x, the weight and the bias to y: a seam, for another number format."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        bias = None if self.bias is None else self.use(self.bias)
        return self.multiply(x, self.use(self.weight), bias)


class Embedding(Module):
    """Rows of a table, by token id."""

    weight: Parameter

    def __init__(self, vocabulary: int, width: int, init: Init) -> None:
        super().__init__()
        self.declare("weight", (vocabulary, width), ("vocab", "width"), init)
        self.look: Callable[[Tensor, Tensor], Tensor] = F.embedding
        """From ids [...] and the table to rows [..., D]: a seam, for a table of which only some rows are here."""

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, D]."""
        return self.look(ids, self.use(self.weight))
