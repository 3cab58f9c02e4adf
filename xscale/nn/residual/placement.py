"""Where a sublayer has its norms, or what stands in the place of one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xscale.nn.module import Module
from xscale.nn.norm.norm import NORMS
from xscale.nn.residual.residual_gain import ResidualWeight


@dataclass(frozen=True)
class Around:
    """A submodule of a sublayer, x [B, T, D] -> [B, T, D], beside the mixer or feed-forward part itself."""

    name: str
    """Its attribute, and so the name of its parameters: `stack.blocks.0.mixer.norm.weight`."""
    make: Callable[[Any, int], Module]
    """From the config of the block's norm and the width."""
    is_norm: bool = True
    """Whether its output is normalised."""


NORM = Around("norm", NORMS.build)
SECOND_NORM = Around("after", NORMS.build)
WEIGHT = Around("alpha", lambda _, width: ResidualWeight(), is_norm=False)


@dataclass(frozen=True)
class Placement:
    """Submodules around the part f of a sublayer: total(x + after(f(before(x)))); None: nothing."""

    before: Around | None = None
    """Maps what the part reads."""
    after: Around | None = None
    """Maps its output, before it is written."""
    total: Around | None = None
    """Maps what was written, so that the next sublayer reads a normalised stream."""

    @property
    def parts(self) -> list[Around]:
        """All submodules, in the order of their parameters."""
        return [part for part in (self.before, self.after, self.total) if part is not None]

    @property
    def needs_final_norm(self) -> bool:
        """Whether the output of the last block is normalised once more: sublayers have norms, and the stream none."""
        return self.total is None and any(part.is_norm for part in self.parts)
