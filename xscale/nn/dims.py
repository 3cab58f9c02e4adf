"""The sizes and the setting that every part of one model agrees on."""

from dataclasses import dataclass

from xscale.core.config import Config
from xscale.nn.init import Init


@dataclass(frozen=True)
class Dims:
    """What a part is told about the model it is built into, beside its own config."""

    width: int
    """D, the width of the residual stream."""
    depth: int
    """Blocks in the stack the part is in; scales the start of what writes into the residual stream."""
    vocabulary: int
    """V."""
    length: int
    """The longest sequence, in tokens, that the model is trained on."""
    causal: bool
    """Whether a token may only see itself and what stands before it."""
    position: Config | None = None
    """Config of the model's position part; mixers build it where it acts inside attention."""
    std: float = 0.02
    """Standard deviation of initial weights."""
    layer: int = 0
    """Index of the block in its stack."""
    cross: bool = False
    """Whether the part reads another sequence's hidden states (T != S)."""

    @property
    def start(self) -> Init:
        """Start of an ordinary weight."""
        return Init(std=self.std)

    @property
    def residual_start(self) -> Init:
        """Start of a weight that writes into the residual stream, of which 2 * depth add up (Radford et al. 2019)."""
        return Init(std=self.std / (2 * self.depth) ** 0.5)
