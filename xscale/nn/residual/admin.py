"""Liu et al. 2020 (Admin): norm(omega x + f(x)), with learned gains omega [D] of the residual connection.

A forward over the run's first batch sets them, by the variance of the sublayers before (`train/residual_gains.py`).
"""

from typing import Any

from torch import Tensor

from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.dims import Dims
from xscale.nn.residual.placement import NORM, Placement
from xscale.nn.residual.residual_gain import ResidualGain
from xscale.nn.residual.residual_stream import RESIDUALS, ResidualStream, ResidualTraits
from xscale.nn.residual.sublayer import Sublayer


class GainedSublayer(Sublayer):
    """Adds its output to the stream times a gain of each channel."""

    omega: ResidualGain

    def add_parts(self, config: Any, dims: Dims, number: int) -> None:
        self.omega = ResidualGain(dims.width)

    def keep(self, x: Tensor) -> Tensor:
        kept: Tensor = self.omega(x)
        return kept


@RESIDUALS.register("admin", traits=ResidualTraits(hidden_states=True))
class Admin(ResidualStream):
    sublayer = GainedSublayer
    own_placement = Placement(total=NORM)
    set_by_data = True

    @classmethod
    def check_stack(cls, stack: Any, path: str, *, cross: bool) -> list[Problem]:
        if stack.share == "none":
            return []
        what = "residual 'admin' gives each sublayer the gain of its depth, and shared ones have one for all depths"
        return [
            Problem(
                f"{path}.share",
                what,
                choices=take("none") + take("post", key=f"{path}.block.residual"),
            )
        ]
