"""Parisotto et al. 2019 (GTrXL): a gate as in a gated recurrent unit in the place of the sum with the residual stream.

    r = sigmoid(W_r y + U_r x),  z = sigmoid(W_z y + U_z x - b_g),  h = tanh(W_g y + U_g (r * x))
    x' = (1 - z) * x + z * h,  y = relu(f(norm(x)))

b_g > 0 begins near the identity (sections 3.1 and 3.2, TrXL-I with gates).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import NonNegativeFloat
from xscale.nn.dims import Dims
from xscale.nn.init import Init
from xscale.nn.module import Module
from xscale.nn.residual.placement import NORM, Placement
from xscale.nn.residual.residual_stream import RESIDUALS, ResidualStream, ResidualTraits
from xscale.nn.residual.sublayer import Sublayer
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


class GruGate(Module):
    """The gate of one sublayer."""

    seams = {"param_hook": Role.PARAMETERS_BETWEEN_REGIONS}
    of_output: Parameter
    of_stream: Parameter
    candidate: Parameter
    bias: Parameter

    def __init__(self, dims: Dims, bias: float) -> None:
        super().__init__()
        width = dims.width
        square: Any = ("width", "width")
        self.declare(
            "of_output", (3 * width, width), square, dims.init, linear_map=True
        )  # W_r, W_z, W_g
        self.declare(
            "of_stream", (2 * width, width), square, dims.init, linear_map=True
        )  # U_r, U_z
        self.declare("candidate", (width, width), square, dims.init, linear_map=True)  # U_g
        self.declare("bias", (width,), ("width",), Init("constant", value=bias), decays=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x and y [B, T, D] -> [B, T, D]."""
        reset, update, candidate = F.linear(y, self.use(self.of_output)).chunk(3, -1)
        reset_of_x, update_of_x = F.linear(x, self.use(self.of_stream)).chunk(2, -1)
        r = torch.sigmoid(reset + reset_of_x)
        z = torch.sigmoid(update + update_of_x - self.use(self.bias))
        h = torch.tanh(candidate + F.linear(r * x, self.use(self.candidate)))
        return torch.lerp(x, h, z)


class GatedSublayer(Sublayer):
    """Puts what the gate makes of stream and output in the place of the stream."""

    gru: GruGate

    def add_parts(self, config: Any, dims: Dims, number: int) -> None:
        self.gru = GruGate(dims, config.residual.bias)

    def write(self, y: Tensor, stream: Tensor, tokens: Tokens) -> Tensor:
        gated: Tensor = self.gru(stream, self.drop(torch.relu(y), tokens))
        return gated


@RESIDUALS.register(
    "gru_gate",
    traits=ResidualTraits(hidden_states=True),
    deviations=("The output of the last block is normalised once more, as with pre-norm.",),
)
class GruGated(ResidualStream):
    class Config(ResidualStream.Config):
        bias: NonNegativeFloat = 2.0
        """Initial b_g; above 0 the stream mostly stays as it is at first."""

    sublayer = GatedSublayer
    own_placement = Placement(before=NORM)
    skippable = False
