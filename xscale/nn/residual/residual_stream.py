"""Base class of residual streams: how the sublayers of a stack read from it and write to it. One file a kind.

A stack has one `ResidualStream`, which says how the stream begins and ends, and what of it passes to the next stage of
a pipeline. Its sublayers, of the class `sublayer`, read from it and write to it. The stream itself is the value that
passes from block to block: a tensor, or several in a tuple. All of them are [B, T, ...], a function of each token by
itself but for the mixers, so that sequence and context parallelism give each rank a shard of the second dim; tensor
parallelism shards none of them. Recomputation saves the stream before a block, whatever it is.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from xscale.core import config as schema
from xscale.core.errors import Problem
from xscale.core.registry import Family
from xscale.nn.dims import Dims
from xscale.nn.module import Part
from xscale.nn.residual.placement import Placement
from xscale.nn.residual.sublayer import Sublayer
from xscale.nn.roles import Role


@dataclass(frozen=True)
class ResidualTraits:
    """Properties that a residual stream declares and the conformance suite checks."""

    hidden_states: bool
    """The stream is one tensor, the hidden states [B, T, D], which depth passes and positions read and change."""


class ResidualStream(Part):
    """The residual stream of a stack; built as `ResidualStream(config, dims)`."""

    class Config(schema.Config):
        pass

    seams = {"begin": Role.STREAM_START}
    sublayer: ClassVar[type[Sublayer]] = Sublayer
    """Class of its sublayers."""
    own_placement: ClassVar[Placement] = Placement()
    """Submodules around the part of each sublayer, where the config does not choose them."""
    replaces: ClassVar[bool] = False
    """Whether a sublayer's output takes the place of the stream."""
    skippable: ClassVar[bool] = True
    """Whether a sublayer whose output is 0 leaves the stream as it is, but for a norm."""
    joins_sublayers: ClassVar[bool] = False
    """Whether the feed-forward part reads the stream where the mixer does."""
    frees_inputs: ClassVar[bool] = False
    """Whether a block's input may be computed from its output, and be freed in forward."""
    set_by_data: ClassVar[bool] = False
    """Whether a forward over the run's first batch sets its parameters, sublayer by sublayer."""
    precise: ClassVar[bool] = False
    """Whether its tensors are in float32 at least, whatever the compute precision is."""
    form: ClassVar[str] = ""
    """A clause that says what the stream is, for refusals; empty where it is the hidden states."""

    @property
    def is_hidden_states(self) -> bool:
        """Whether the stream is one tensor, the hidden states [B, T, D]."""
        return RESIDUALS.get(str(self.Config.kind)).traits.hidden_states

    @classmethod
    def placement(cls, config: Any) -> Placement:
        """Return the submodules around the part of each sublayer. A converter finds its tensors by these names."""
        inner = getattr(config, "placement", None)
        placement: Placement = (
            cls.own_placement if inner is None else RESIDUALS.get(inner).part.own_placement
        )
        return placement

    @classmethod
    def instead(cls, config: Any) -> str:
        """Return the kind with the same norms whose stream is the hidden states, for refusals."""
        return getattr(config, "placement", None) or "pre"

    @classmethod
    def check_block(cls, block: Any, path: str, *, cross: bool) -> list[Problem]:
        """List what of a `BlockConfig`, at `path`, the stream cannot be with; `cross`: it reads an encoder's output."""
        return []

    @classmethod
    def check_stack(cls, stack: Any, path: str, *, cross: bool) -> list[Problem]:
        """List what of a `StackConfig`, at `path`, the stream cannot be with."""
        return []

    def __init__(self, config: Any, dims: Dims) -> None:
        """`dims.depth` is that of the stack."""
        super().__init__()

    def begin(self, x: Tensor) -> Any:
        """Return the stream before the first block, for x [B, T, D]. A seam: a stage of a pipeline receives it."""
        return x

    def end(self, stream: Any) -> Tensor:
        """Return the output [B, T, D] of the last block, before the final norm."""
        x: Tensor = stream
        return x

    def sent(self, sublayers: int) -> int:
        """Return how many tensors pass to the next stage of a pipeline behind that many sublayers of the stack."""
        return 1

    def to_tensors(self, stream: Any) -> tuple[Tensor, ...]:
        """Return the tensors [B, T, D] that pass to the next stage, the stream's in any form."""
        return (stream,)

    def from_tensors(self, tensors: tuple[Tensor, ...]) -> Any:
        """Return the stream for the tensors of the stage before."""
        (x,) = tensors
        return x


RESIDUALS = Family("residual", ResidualTraits, ResidualStream)
AddingPlacement = Literal["pre", "sandwich", "res_post", "rezero", "no_norm"]
"""Kinds whose sublayers add to the stream and leave the sum as it is, so that others can have their norms."""


def fold_placement(placement: Any, residual: Any) -> Any:
    """Return the value of `residual` for the old keys `placement` and `residual` of a block; None: they contradict."""
    kind = residual.get("kind") if isinstance(residual, dict) else residual
    if kind in (None, "sequential"):
        return placement
    if kind in RESIDUALS and "placement" in RESIDUALS.get(kind).part.Config.model_fields:
        return {
            **(residual if isinstance(residual, dict) else {"kind": kind}),
            "placement": placement,
        }
    return None
