"""Attention residuals (Kimi Team 2026): a sublayer reads a softmax mixture of what all earlier blocks have written.

    h_l = sum_i a_i V_i,  a = softmax_i(w_l . RMSNorm(V_i)),  V = (b_0, ..., b_{n-1}, b_n so far)

b_0 are the embeddings and b_n the sum of the outputs f(norm(h)) of block n, of S sublayers; the one being made is read
from its second sublayer on. w_l [D] is learned for each sublayer, and one more for the output of the stack. S = 1 are
the full attention residuals, a larger S the paper's blocks of them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import divisors, take
from xscale.nn.dims import Dims
from xscale.nn.init import ZEROS
from xscale.nn.module import Module
from xscale.nn.norm.norm import NORMS, Norm, Rms
from xscale.nn.residual.residual_stream import (
    RESIDUALS,
    AddingPlacement,
    ResidualStream,
    ResidualTraits,
)
from xscale.nn.residual.sublayer import Sublayer
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens

Written = tuple[Tensor, ...]
"""The embeddings, and the sum of the outputs of each block so far, [B, T, D] each."""


class DepthMixture(Module):
    """Softmax attention of one learned query over the blocks, of each token by itself."""

    # The role of its parameters is that of the norm's too: sequence parallelism sums the gradients of both.
    seams = {"param_hook": Role.PARAMETERS_BETWEEN_REGIONS}
    query: Parameter
    key_norm: Norm

    def __init__(self, width: int) -> None:
        super().__init__()
        # All blocks weigh the same at first.
        self.declare("query", (width,), ("width",), ZEROS, decays=False)
        self.key_norm = NORMS.build(Rms.Config(), width)

    def forward(self, written: Written) -> Tensor:
        """Tensors [B, T, D] -> their mixture [B, T, D]."""
        query = self.use(self.query)
        scores = torch.stack([self.key_norm(x) @ query for x in written], -1)  # [B, T, N]
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        weights = scores.softmax(-1).to(query.dtype).unbind(-1)
        return sum(weight[..., None] * x for weight, x in zip(weights, written, strict=True))  # type: ignore[return-value]


class MixingSublayer(Sublayer):
    """Reads a mixture of all blocks, and adds its output to the block that is being made."""

    depth_mixture: DepthMixture

    def add_parts(self, config: Any, dims: Dims, number: int) -> None:
        self.depth_mixture = DepthMixture(dims.width)
        self.begins_block = number % config.residual.sublayers == 0
        """Whether it is the first sublayer of a block."""

    def read(self, stream: Written) -> Tensor:
        mixture: Tensor = self.depth_mixture(stream)
        return mixture

    def write(self, y: Tensor, stream: Written, tokens: Tokens) -> Written:
        y = self.drop(y, tokens)
        return (*stream, y) if self.begins_block else (*stream[:-1], stream[-1] + y)


@RESIDUALS.register(
    "attention_residuals",
    traits=ResidualTraits(hidden_states=False),
    deviations=(
        "A block is a number of sublayers, so that a deeper stack has more blocks; the paper fixes their count.",
    ),
)
class AttentionResiduals(ResidualStream):
    """Kimi Team 2026: each sublayer reads a softmax mixture of what all earlier blocks have written."""

    class Config(ResidualStream.Config):
        sublayers: PositiveInt = 2
        """S, the sublayers of a block, whose outputs are added up; 1: later ones read each output by itself."""
        placement: AddingPlacement = "pre"
        """The residual stream whose norms the sublayers have."""

    seams = {"output_mixture": Role.ON_LAST_STAGE}
    sublayer = MixingSublayer
    skippable = False
    form = "attention residuals have a tensor of each block"

    def __init__(self, config: Any, dims: Dims) -> None:
        super().__init__(config, dims)
        self.sublayers: int = config.sublayers
        self.output_mixture = DepthMixture(dims.width)

    @classmethod
    def check_stack(cls, stack: Any, path: str, *, cross: bool) -> list[Problem]:
        size, count = stack.block.residual.sublayers, len(stack.block.listed(cross=cross))
        if stack.share == "none" or count % size == 0:
            return []
        what = f"blocks that share their {count} sublayers begin at the same one, which {size} does not divide"
        choices = divisors(count) + take("none", key=f"{path}.share")
        return [Problem(f"{path}.block.residual.sublayers", what, choices=choices)]

    def begin(self, x: Tensor) -> Written:
        return (x,)

    def end(self, stream: Written) -> Tensor:
        """Return the mixture of all blocks, by the query of the output."""
        mixture: Tensor = self.output_mixture(stream)
        return mixture

    def sent(self, sublayers: int) -> int:
        return 1 + -(-sublayers // self.sublayers)

    def to_tensors(self, stream: Written) -> tuple[Tensor, ...]:
        return stream

    def from_tensors(self, tensors: tuple[Tensor, ...]) -> Written:
        return tensors
