"""Sizes and settings that are common to every part of one model."""

from dataclasses import dataclass

from xscale.core.config import Config
from xscale.core.errors import ConfigError
from xscale.nn.init import Init


@dataclass(frozen=True)
class Dims:
    """Properties of the model that a part is built into."""

    width: int
    """D, the width of the residual stream."""
    depth: int
    """Blocks in the part's stack; scales the initial weights that write into the residual stream."""
    vocabulary: int
    """V."""
    length: int
    """The longest sequence, in tokens, that the model is trained on."""
    causal: bool
    """Whether a token sees only itself and earlier tokens."""
    position: Config | None = None
    """Config of the position part, if it acts inside attention: each mixer builds its own."""
    std: float = 0.02
    """Standard deviation of initial weights."""
    layer: int = 0
    """Index of the block in its stack."""
    sublayers_before: int = 0
    """Sublayers of the blocks before it in its stack."""
    cross: bool = False
    """Whether the part attends to another sequence (T != S)."""

    @property
    def init(self) -> Init:
        """Initialiser of an ordinary weight."""
        return Init(std=self.std)

    @property
    def residual_init(self) -> Init:
        """Initialiser of a weight that writes into the residual stream, where 2 * depth of them add up (Radford et al.
        2019)."""
        return Init(std=self.std / (2 * self.depth) ** 0.5)


def check_trained_length(path: str, tokens: int, trained: int) -> None:
    """Raise ConfigError for more tokens than the part at `path` has weights for, `trained`."""
    if tokens > trained:
        what = f"{path} has weights for {trained} positions, and the sequence has {tokens} tokens"
        fix = f"Take a sequence of at most {trained} tokens, or train with data.sequence_length={tokens}."
        raise ConfigError("data.sequence_length", what, fix)
