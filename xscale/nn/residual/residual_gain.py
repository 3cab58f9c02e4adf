"""Learned factors of a sublayer's output (ReZero) and of its residual connection (Admin)."""

from torch import Tensor
from torch.nn import Parameter

from xscale.core.requirements import KeyNeed
from xscale.nn.init import ONES, ZEROS
from xscale.nn.module import Module
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


class ResidualWeight(Module):
    """The factor alpha of a residual branch, one scalar that starts at 0 (Bachlechner et al. 2021, ReZero)."""

    seams = {"param_hook": Role.PARAMETERS_BETWEEN_REGIONS}
    weight: Parameter

    def __init__(self) -> None:
        super().__init__()
        self.declare("weight", (1,), ("state",), ZEROS, decays=False)

    def forward(self, y: Tensor, tokens: Tokens | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return self.use(self.weight).to(y.dtype) * y


class ResidualGain(Module):
    """The gains omega [D] of a residual connection (Liu et al. 2020, Admin), which start at 1.

    A training run gives them other values before its first step; see `xscale.train.residual_gains`.
    """

    seams = {"param_hook": Role.PARAMETERS_BETWEEN_REGIONS}
    weight: Parameter

    def __init__(self, width: int) -> None:
        super().__init__()
        self.declare("weight", (width,), ("width",), ONES, decays=False)

    def needs(self) -> list[KeyNeed]:
        why = "residual 'admin' sets gains by a pass before the first step, and DeepSpeed keeps its own copy"
        return [
            KeyNeed(
                "parallel.zero.engine", ("torch",), why, (("model.stack.block.residual", "post"),)
            )
        ]

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return self.use(self.weight).to(x.dtype) * x
