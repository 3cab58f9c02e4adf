"""The linear map and the token embedding, with named axes."""

from typing import Self

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.nn.axes import Axis
from xscale.nn.dims import Dims
from xscale.nn.init import ZEROS, Init
from xscale.nn.module import Module
from xscale.nn.roles import Role


class Linear(Module):
    """y = x W^T + b."""

    seams = {"matmul": Role.LINEAR_MAP}
    weight: Parameter
    lora: Module | None
    """LoRA of the map, `xscale.nn.adapt.lora.Lora`, whose output is added; None: there is none."""

    def __init__(
        self, inputs: int, outputs: int, axes: tuple[Axis, Axis], init: Init, *, bias: bool = False
    ) -> None:
        """`axes` names the weight's dims: (outputs, inputs)."""
        super().__init__()
        self.lora = None
        self.declare("weight", (outputs, inputs), axes, init, linear_map=True)
        self.bias: Tensor | None
        if bias:
            self.declare("bias", (outputs,), axes[:1], ZEROS, decays=False)
        else:
            self.bias = None

    @classmethod
    def from_width(cls, dims: Dims, outputs: int, axis: Axis, *, bias: bool = False) -> Self:
        """Map hidden states [..., D] to `outputs` channels of `axis`; where that is sharded over tp, it is Megatron's
        column-parallel linear."""
        return cls(dims.width, outputs, (axis, "width"), dims.init, bias=bias)

    @classmethod
    def to_width(cls, dims: Dims, inputs: int, axis: Axis, *, bias: bool = False) -> Self:
        """Map `inputs` channels of `axis` to what is added to the residual stream [..., D]; where the axis is sharded
        over tp, it is Megatron's row-parallel linear."""
        return cls(inputs, dims.width, ("width", axis), dims.residual_init, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        bias = None if self.bias is None else self.use(self.bias)
        out = self.matmul(x, self.use(self.weight), bias)
        return out if self.lora is None else out + self.lora(x)

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., inputs], weight [outputs, inputs], bias [outputs] -> [..., outputs]. A seam: other number formats."""
        return F.linear(x, weight, bias)


class Embedding(Module):
    """Rows of a table, by token id."""

    seams = {"lookup": Role.VOCABULARY_LOOKUP}
    weight: Parameter

    def __init__(self, vocabulary: int, width: int, init: Init, *, fix_norm: bool = False) -> None:
        """`fix_norm`: rows are divided by their lengths (Nguyen and Chiang 2018)."""
        super().__init__()
        self.fix_norm = fix_norm
        self.declare("weight", (vocabulary, width), ("vocab", "width"), init)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, D]."""
        rows = self.lookup(ids, self.use(self.weight))
        return F.normalize(rows, dim=-1) if self.fix_norm else rows

    def lookup(self, ids: Tensor, table: Tensor) -> Tensor:
        """ids [...], table [V, D] -> rows [..., D]. A seam: vocabulary-parallel lookup in a sharded table."""
        return F.embedding(ids, table)
