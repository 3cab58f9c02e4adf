"""Reversible residual blocks (Gomez et al. 2017), as in Reformer (Kitaev et al. 2020, section 3): two residual streams.

Each sublayer f adds to one stream what it makes of the other, Y1 = X1 + Attention(X2) and then Y2 = X2 + FFN(Y1). So
inputs can be computed from outputs, X2 = Y2 - FFN(Y1) and X1 = Y1 - Attention(X2), and need not be saved for backward
(`xscale.parallel.reversible`).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xscale.core.errors import Problem
from xscale.core.requirements import change, take
from xscale.nn.mixer.mixer import MIXERS, hands_on_scores, without_scores
from xscale.nn.residual.residual_stream import (
    RESIDUALS,
    AddingPlacement,
    ResidualStream,
    ResidualTraits,
)
from xscale.nn.residual.sublayer import Sublayer
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


class Streams(NamedTuple):
    """The two residual streams, [B, T, D] each, in float32 at least: backward subtracts what forward added."""

    first: Tensor
    """The stream to which the next sublayer adds."""
    second: Tensor
    """The stream that the next sublayer reads."""


def upcast_copy(x: Tensor) -> Tensor:
    """Copy [B, T, D] to float32, or to its own type if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)


class ReversibleSublayer(Sublayer):
    """Adds to the first stream what it makes of the second, and swaps them."""

    seams = {"add_branch": Role.RESIDUAL_SUM}

    def forward(
        self,
        stream: Streams,
        tokens: Tokens,
        memory: Tensor | None = None,
        source: Tokens | None = None,
        residual: Any = None,
        edge: Any = None,
        edges: Any = None,
    ) -> Streams:
        assert residual is None, "`check_stack` refuses parallel sublayers"
        memory_and_source = () if memory is None else (memory, source)
        y = self.add_branch(stream.first, stream.second, tokens, *memory_and_source)
        return Streams(stream.second, y)

    def add_branch(self, first: Tensor, second: Tensor, *inputs: Any) -> Tensor:
        """first + f(second), all [B, T, D]. A seam: `first` is freed, and reconstructed in backward."""
        return first + self.branch(second, *inputs)


@RESIDUALS.register("reversible", traits=ResidualTraits(hidden_states=False))
class Reversible(ResidualStream):
    class Config(ResidualStream.Config):
        placement: AddingPlacement = "pre"
        """The residual stream whose norms the sublayers have."""

    sublayer = ReversibleSublayer
    frees_inputs = True
    precise = True
    form = "reversible blocks have two residual streams"

    @classmethod
    def check_stack(cls, stack: Any, path: str, *, cross: bool) -> list[Problem]:
        """List what would be kept for backward, and what adds to one stream."""
        problems = []
        single = take(cls.instead(stack.block.residual))
        blocks = [stack.block_config(layer) for layer in range(stack.depth)]
        if any(sublayer.parallel for block in blocks for sublayer in block.listed()):
            what = f"{cls.form}, and parallel sublayers add to one"
            choices = take(cls.instead(stack.block.residual), key=f"{path}.block.residual")
            parallel = [
                number for number, entry in enumerate(stack.block.sublayers or ()) if entry.parallel
            ]
            keys = [f"{path}.block.sublayers.{number}.parallel" for number in parallel]
            choices += change(*[(key, False) for key in keys]) if keys else ()
            problems.append(Problem(f"{path}.block.sublayers", what, choices=choices))
        kept = (
            "reversible blocks keep nothing for backward, and {} that blocks hand on would be kept"
        )
        if hands_on_scores(stack):
            choices = single + without_scores(stack)
            problems.append(
                Problem(f"{path}.block.residual", kept.format("scores"), choices=choices)
            )
        value_keys = [
            key for mixer in stack.mixers() if (key := MIXERS.of(mixer).part.values_key(mixer))
        ]
        if value_keys:
            choices = single + take(None, key=f"{path}.block.mixer.{value_keys[0]}")
            problems.append(
                Problem(f"{path}.block.residual", kept.format("values"), choices=choices)
            )
        return problems

    def begin(self, x: Tensor) -> Streams:
        return Streams(upcast_copy(x), upcast_copy(x))

    def end(self, stream: Streams) -> Tensor:
        """Return the mean of both, in compute dtype."""
        return self.use((stream.first + stream.second) / 2)

    def sent(self, sublayers: int) -> int:
        return 2

    def to_tensors(self, stream: Streams) -> tuple[Tensor, ...]:
        return tuple(stream)

    def from_tensors(self, tensors: tuple[Tensor, ...]) -> Streams:
        first, second = tensors
        return Streams(upcast_copy(first), upcast_copy(second))
