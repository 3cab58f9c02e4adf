"""Guo et al. 2022 (LongT5), transient global attention (TGlobal), as in the paper: blocks are summed before projection.

A token sees the keys at most `radius` away and one key for each block: the block's hidden states are summed, normed
(RMS with gain) and projected by the same weights as the tokens. T5's relative bias is added to local scores by distance
in tokens, and to the blocks' scores by distance in blocks, from a second table. With `position.shared` all layers have
the same two tables, as in T5.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from xscale.core.errors import Problem
from xscale.nn.attention.core import CoreSlot
from xscale.nn.attention.longt5 import LongT5
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import ACTS_INSIDE, BIDIRECTIONAL, MIXERS
from xscale.nn.mixer.without_padding import without_padding
from xscale.nn.module import Module
from xscale.nn.norm.norm import Rms
from xscale.nn.position.position import POSITIONS, Position
from xscale.nn.tokens import Tokens


@MIXERS.register(
    "longt5",
    traits=BIDIRECTIONAL,
    deviations=(
        "A sequence shorter than a block has one block; in the authors' code it has none.",
    ),
)
class TransientGlobalAttention(Attention):
    class Config(Attention.Config):
        core: CoreSlot = LongT5.Config()
        """The core `longt5`, which has the radius and the size of a block."""

    cores = ("longt5",)
    shards_sequence = False
    core: LongT5

    def __init__(self, config: Config, dims: Dims) -> None:
        assert isinstance(config.core, LongT5.Config)
        core = config.core.model_copy(update={"norm": "input"})
        super().__init__(config.model_copy(update={"core": core}), dims)
        self.block_norm = Rms(Rms.Config(), dims.width)
        self.block_position: Position | None = None
        if self.position is not None and self.position.adds_bias:
            position = config.position or dims.position
            assert position is not None
            part: Position = POSITIONS.build(position, dims, config.heads, self.head_width)
            if part.shared:
                self.core.layer_tables = Module()
                self.core.layer_tables.block_position = part
            else:
                self.block_position = part

    @classmethod
    def example(cls) -> Any:
        return cls.Config(core=LongT5.example())

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(
            config.model_copy(update={"position": None}), replace(dims, position=None), path
        )
        return problems + cls._check_position_acts(config, dims, path)

    @classmethod
    def why_not_position(cls, position: Any) -> str | None:
        if position.kind == "relative" or POSITIONS.of(position).traits.where not in ACTS_INSIDE:
            return None
        return "acts on keys or their scores, and a block's key has no position of its own"

    @classmethod
    def layer_tables(cls, config: Config, dims: Dims) -> list[tuple[Any, ...]]:
        position = config.position or dims.position
        return [("longt5", config.heads, position)] if getattr(position, "shared", False) else []

    forward = without_padding(Attention.forward)

    def attend_input(
        self, x: Tensor, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> Tensor:
        """Attend to the local keys and to those of the blocks' normed sums."""
        sums = self.block_norm(self.core.block_sums(x))  # [B, M, D]
        summaries = self._keys(sums, None if self.k is not None else self.q(sums))
        position, tables = self.block_position, self.core.layer_tables
        if tables is not None:
            position = tables.get_submodule("block_position")  # type: ignore[assignment]
        return self.core.attend(
            q, k, v, summaries, mask, None if position is None else position.relative_bias
        )
