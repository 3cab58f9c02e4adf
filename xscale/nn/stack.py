"""A stack of blocks, uniform or by rules: every second one a mixture of experts, sparse and dense attention in turn."""

from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from xscale.core.config import Config, Slot
from xscale.core.errors import Problem
from xscale.nn.attention.core import share_layer_tables
from xscale.nn.block import NORMLESS, Block, BlockConfig, SublayerConfig
from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import FFNS, Ffn
from xscale.nn.mixer.mixer import MIXERS, Mixer
from xscale.nn.module import Module
from xscale.nn.norm import NORMS, Norm
from xscale.nn.position.position import Position, share_position
from xscale.nn.random import reseed
from xscale.nn.tokens import Tokens

OVERRIDES = ("mixer", "ffn", "sublayers")
"""Keys of a block that a rule can set."""


class LayerRule(Config):
    """Overrides parts of some blocks. Later rules win over earlier ones."""

    every: int = Field(default=1, ge=1)
    """Period of the rule: 2 is every second block (GShard, Switch)."""
    at: int = Field(default=0, ge=0)
    """First block of each period to which the rule applies, from 0."""
    first: int = Field(default=0, ge=0)
    """Blocks before this one are left alone."""
    last: int | None = Field(default=None, ge=0)
    """Blocks from this one on are left alone; null: none."""
    mixer: Annotated[Mixer.Config, Slot(MIXERS)] | None = None
    """The mixer of these blocks; null: unchanged."""
    ffn: Annotated[Ffn.Config, Slot(FFNS)] | None = None
    """The position-wise part of these blocks; null: unchanged."""
    sublayers: tuple[SublayerConfig, ...] | None = Field(default=None, min_length=1)
    """The sublayers of these blocks, in their order; null: unchanged."""

    def applies_to(self, layer: int, depth: int) -> bool:
        return self.first <= layer < (depth if self.last is None else self.last) and layer % self.every == self.at


class StackConfig(Config):
    depth: int = Field(default=4, ge=1)
    """Number of blocks."""
    block: BlockConfig = BlockConfig()
    """The config of every block that no rule overrides."""
    rules: tuple[LayerRule, ...] = ()
    """Overrides for some blocks, by a pattern over the depth."""

    def block_config(self, layer: int) -> BlockConfig:
        """Config of block `layer`, with the rules applied."""
        changes: dict[str, Any] = {}
        for rule in self.rules:
            if rule.applies_to(layer, self.depth):
                changes |= {name: part for name in OVERRIDES if (part := getattr(rule, name)) is not None}
        return self.block.model_copy(update=changes)

    def mixers(self) -> list[Mixer.Config]:
        """Configs of the mixers of all blocks, without cross-attention."""
        return [mixer for layer in range(self.depth) for mixer in self.block_config(layer).mixers()]


class Stack(Module):
    """[B, T, D] -> [B, T, D], with the final norm that pre-norm needs. Blocks keep their index on every layout."""

    seams: ClassVar[tuple[str, ...]] = ("run_block", "norm", "position", "core_tables")

    def __init__(self, config: StackConfig, dims: Dims, *, cross: bool = False) -> None:
        super().__init__()
        dims = replace(dims, depth=config.depth)
        self.blocks = nn.ModuleDict(
            {
                str(layer): Block(config.block_config(layer), replace(dims, layer=layer), cross=cross)
                for layer in range(config.depth)
            }
        )
        self.position: Position | None = share_position(self.blocks.values())
        """The position part that all mixers have in common; None: each has its own."""
        self.core_tables: Module | None = share_layer_tables(self.blocks.values())
        """The parameters that all attention cores have in common; None: none."""
        ends_in_norm = config.block.placement not in ("post", *NORMLESS)
        self.norm: Norm | None = NORMS.build(config.block.norm, dims.width) if ends_in_norm else None

    @staticmethod
    def check(config: StackConfig, dims: Dims, path: str, *, cross: bool = False) -> list[Problem]:
        """List the problems of all blocks, each once."""
        problems: dict[str, Problem] = {}
        for index, rule in enumerate(config.rules):
            if rule.at >= rule.every:
                what = f"at={rule.at} is outside the period every={rule.every}"
                problem = Problem(f"{path}.rules.{index}", what, f"Take at from 0 to {rule.every - 1}.")
                problems[str(problem)] = problem
        for layer in range(config.depth):
            block = config.block_config(layer)
            where = f"{path}.block" if block == config.block else f"{path} (block {layer})"
            for problem in Block.check(block, replace(dims, depth=config.depth, layer=layer), where, cross=cross):
                problems.setdefault(f"{problem.what}{problem.path.split(')')[-1]}", problem)
        return [
            *problems.values(),
            *_check_parts(config, path, cross=cross),
            *_check_shared_position(config, dims, path),
            *_check_layer_tables(config, dims, path),
        ]

    def forward(self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None) -> Tensor:
        for block in self.blocks.values():
            assert isinstance(block, Block)
            if tokens.rng_seed is not None:
                # Each block's dropout is a function of (seed, step, micro-batch, block): the same on every layout, and
                # a resumed run needs no saved generator to draw what the uninterrupted run would have drawn.
                reseed(tokens.rng_seed, block.path)
            x = self.run_block(block, x, tokens, memory, source)
        return x if self.norm is None else self.norm(x)

    def run_block(self, block: Block, *inputs: Any) -> Tensor:
        """`block(*inputs)`. A seam: activation checkpointing."""
        out: Tensor = block(*inputs)
        return out


def _check_parts(config: StackConfig, path: str, *, cross: bool) -> list[Problem]:
    """Check that some block moves information between tokens, and in a decoder with a source some reads it."""
    parts = {entry.part for layer in range(config.depth) for entry in config.block_config(layer).listed(cross=cross)}
    missing = {"mixer", *["cross"] * cross} - parts
    what = "no block has a sublayer '{}', without which {}"
    lost = {"mixer": "no token sees another", "cross": "the decoder does not read the source"}
    return [
        Problem(f"{path}.block.sublayers", what.format(part, lost[part]), f"Add {{part: {part}}} to the sublayers.")
        for part in sorted(missing)
    ]


def _check_layer_tables(config: StackConfig, dims: Dims, path: str) -> list[Problem]:
    """Check that the mixers whose cores share tables over the layers have the same tables."""
    tables = {}
    mixer: Any
    for mixer in config.mixers():
        for table in MIXERS.of(mixer).part.layer_tables(mixer, dims):
            tables[table] = table[0]
    if len(tables) < 2:
        return []
    what = f"the blocks share tables of their cores ({', '.join(tables.values())}), which differ in heads or config"
    return [Problem(f"{path}.rules", what, "Take cores with the same heads and config, or without shared tables.")]


def _check_shared_position(config: StackConfig, dims: Dims, path: str) -> list[Problem]:
    """Check that the mixers which share the table of a position part have one of the same shape."""
    tables = set()
    mixer: Any
    for mixer in config.mixers():
        position: Any = getattr(mixer, "position", None) or dims.position
        if hasattr(mixer, "heads") and getattr(position, "shared", False):
            tables.add((mixer.heads, position))
    if len(tables) < 2:
        return []
    heads = ", ".join(str(count) for count in sorted({count for count, _ in tables}))
    what = f"the blocks share a table of biases per head, and their mixers differ in heads or position (heads: {heads})"
    return [Problem(f"{path}.rules", what, "Take mixers with the same heads and position, or position.shared=false.")]
