"""Wang and Komatsuzaki 2021 (GPT-J): mixer and feed-forward part read the block's input, and both add to it."""

from typing import Any

from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.residual.residual_stream import (
    RESIDUALS,
    AddingPlacement,
    ResidualStream,
    ResidualTraits,
)


@RESIDUALS.register("parallel", traits=ResidualTraits(hidden_states=True))
class Parallel(ResidualStream):
    class Config(ResidualStream.Config):
        placement: AddingPlacement = "pre"
        """The residual stream whose norms the sublayers have."""

    joins_sublayers = True

    @classmethod
    def check_block(cls, block: Any, path: str, *, cross: bool) -> list[Problem]:
        sequential = take(block.residual.placement)
        problems = []
        if cross:
            problems.append(("cross attention is a third sublayer", sequential))
        if block.ffn.kind == "none":
            problems.append(("this block has no sum of the two", sequential))
        if block.sublayers is not None:
            problems.append(
                ("`sublayers` says an order", sequential + take(None, key=f"{path}.sublayers"))
            )
        what = "'parallel' adds a mixer and an ffn to one input; {}"
        return [
            Problem(f"{path}.residual", what.format(reason), choices=choices)
            for reason, choices in problems
        ]
