"""Residual streams without norms: `no_norm`, `rezero`, and `none`, for mixers that are whole layers."""

from typing import Any

from torch import Tensor

from xscale.nn.residual.placement import WEIGHT, Placement
from xscale.nn.residual.residual_stream import RESIDUALS, ResidualStream, ResidualTraits
from xscale.nn.residual.sublayer import Sublayer
from xscale.nn.tokens import Tokens


@RESIDUALS.register("no_norm", traits=ResidualTraits(hidden_states=True))
class NoNorm(ResidualStream):
    """Huang et al. 2020 (T-Fixup): x + f(x)."""


@RESIDUALS.register("rezero", traits=ResidualTraits(hidden_states=True))
class ReZero(ResidualStream):
    """Bachlechner et al. 2021: x + alpha f(x), with a learned scalar alpha that starts at 0."""

    own_placement = Placement(after=WEIGHT)


class ReplacingSublayer(Sublayer):
    """Puts its output in the place of the stream."""

    def read(self, stream: Any) -> Tensor:
        return self.use(stream)

    def write(self, y: Tensor, stream: Any, tokens: Tokens) -> Tensor:
        return self.drop(y, tokens)


@RESIDUALS.register("none", traits=ResidualTraits(hidden_states=True))
class NoResidual(ResidualStream):
    """Guo et al. 2019 (Star-Transformer): f(x), for mixers that are whole layers."""

    sublayer = ReplacingSublayer
    replaces = True
    skippable = False
