"""A stack of blocks, uniform or by rules: every second one a mixture of experts, sparse and dense attention in turn."""

from dataclasses import replace
from typing import Any, TypeVar

from pydantic import Field
from torch import Tensor, nn

from xscale.core.config import Config, NonNegativeInt, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.attention.core import share_layer_tables
from xscale.nn.blocks.block import Block, BlockConfig, SublayerConfig
from xscale.nn.blocks.stack_checks import check_blocks_together, with_keys
from xscale.nn.depth import PASSES, DepthConfig
from xscale.nn.depth.depth_pass import DepthPass, DepthState, Edges, Prediction, StackUse
from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import FfnSlot
from xscale.nn.mixer.mixer import Mixer, MixerSlot
from xscale.nn.module import Module
from xscale.nn.norm.norm import NORMS, Norm
from xscale.nn.position.position import Position, share_position
from xscale.nn.random import reseed
from xscale.nn.residual.residual_stream import RESIDUALS, ResidualStream
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens

PassT = TypeVar("PassT", bound=DepthPass)
ALONE = StackUse()
"""A stack of which its model wants nothing further."""
OVERRIDES = ("mixer", "ffn", "sublayers")
"""Keys of a block that a rule can set."""


class LayerRule(Config):
    """Overrides parts of some blocks. Later rules win over earlier ones."""

    every: PositiveInt = 1
    """Period of the rule: 2 is every second block (GShard, Switch)."""
    at: NonNegativeInt = 0
    """First block of each period to which the rule applies, from 0."""
    first: NonNegativeInt = 0
    """Blocks before this one are left alone."""
    last: NonNegativeInt | None = None
    """Blocks from this one on are left alone; null: none."""
    mixer: MixerSlot | None = None
    """The mixer of these blocks; null: unchanged."""
    ffn: FfnSlot | None = None
    """The position-wise part of these blocks; null: unchanged."""
    sublayers: tuple[SublayerConfig, ...] | None = Field(default=None, min_length=1)
    """The sublayers of these blocks, in their order; null: unchanged."""

    def applies_to(self, layer: int, depth: int) -> bool:
        return (
            self.first <= layer < (depth if self.last is None else self.last)
            and layer % self.every == self.at
        )


class BlocksConfig(Config):
    """Keys of a stack that choose its blocks."""

    depth: int = Field(default=4, ge=1, le=1024)
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
                changes |= {
                    name: part for name in OVERRIDES if (part := getattr(rule, name)) is not None
                }
        return self.block.model_copy(update=changes)

    def mixers(self) -> list[Mixer.Config]:
        """Configs of the mixers of all blocks, without cross-attention."""
        return [mixer for layer in range(self.depth) for mixer in self.block_config(layer).mixers()]


class StackConfig(DepthConfig, BlocksConfig):
    """The blocks, and what happens over the depth beside them."""


class Stack(Module):
    """[B, T, D] -> [B, T, D], with the final norm that pre-norm needs. Blocks keep their index on every layout."""

    seams = {
        "run_block": Role.BLOCK_CALL,
        "norm": Role.BETWEEN_REGIONS,
        "position": Role.IN_REGION,
        "core_tables": Role.IN_REGION,
        "position_tables": Role.BETWEEN_REGIONS,
        "first_edges": Role.HANDED_ON,
        "output": Role.LAST_OUTPUT,
    }

    def __init__(self, config: StackConfig, dims: Dims, use: StackUse = ALONE) -> None:
        super().__init__()
        dims = replace(dims, depth=config.depth)
        blocks: dict[str, Block] = {}
        for layer in range(config.depth):
            before = sum(len(block.order) for block in blocks.values())
            inner = replace(dims, layer=layer, sublayers_before=before)
            blocks[str(layer)] = Block(config.block_config(layer), inner, cross=use.cross)
        built = {part.key: part.build(config, dims, use, blocks) for part in PASSES}
        passes = {key: part for key, part in built.items() if part is not None}
        self.pass_names = tuple(passes)
        """Names of the passes over the depth, in the order in which each hook of theirs is called."""
        self.blocks = nn.ModuleDict(blocks)
        parts = [*blocks.values(), *passes.values()]
        self.position: Position | None = share_position(parts)
        """The position part that all mixers have in common; None: each has its own."""
        self.core_tables: Module | None = share_layer_tables(parts)
        """The parameters that all attention cores have in common; None: none."""
        self.position_tables: Module | None = share_layer_tables(parts, Position)
        """The parameters that the positions of all blocks have in common, where each has others; None: none."""
        for name, part in passes.items():
            self.add_module(name, part)
        self.has_edges = any(part.has_edges for part in self.passes())
        """Whether blocks pass on further tensors beside the hidden states."""
        residual = config.block.residual
        self.stream: ResidualStream = RESIDUALS.build(residual, dims)
        """The residual stream, which passes from block to block."""
        needs_norm = self.stream.placement(residual).needs_final_norm
        self.norm: Norm | None = NORMS.build(config.block.norm, dims.width) if needs_norm else None

    @staticmethod
    def check(config: StackConfig, dims: Dims, path: str, use: StackUse = ALONE) -> list[Problem]:
        """List the problems of all blocks, each once, and of what happens over the depth."""
        dims = replace(dims, depth=config.depth)
        problems: dict[str, Problem] = {}
        for index, rule in enumerate(config.rules):
            if rule.at >= rule.every:
                what = f"at={rule.at} is outside the period every={rule.every}"
                choices = take(rule.every - 1, 0, key=f"{path}.rules.{index}.at")
                problem = Problem(f"{path}.rules.{index}", what, choices=choices)
                problems[str(problem)] = problem
        for layer in range(config.depth):
            block = config.block_config(layer)
            where = f"{path}.block" if block == config.block else f"{path} (block {layer})"
            for problem in Block.check(block, replace(dims, layer=layer), where, cross=use.cross):
                key = f"{problem.what}{problem.path.split(')')[-1]}"
                problems.setdefault(key, with_keys(problem, config, path))
        of_passes = [
            with_keys(problem, config, path)
            for part in PASSES
            for problem in part.check(config, dims, path, use)
        ]
        return [
            *problems.values(),
            *check_blocks_together(config, dims, path, cross=use.cross),
            *of_passes,
        ]

    def forward(
        self,
        x: Any,
        tokens: Tokens,
        memory: Tensor | None = None,
        source: Tokens | None = None,
        prediction: Prediction | None = None,
    ) -> Any:
        """`prediction` is what the model's head predicts from the output; None: the passes know of no such task."""
        state = DepthState(x, tokens, memory, source, prediction, self.first_edges())
        for part in self.passes():
            part.start(state)
        state.x = self.stream.begin(state.x)
        for layer, block in self.blocks.items():
            state.enter(int(layer))
            for part in self.passes():
                part.before_block(state)
            self._pass_block(block, state)
            for part in self.passes():
                part.after_block(state)
        for part in self.passes():
            part.finish(state)
        x = self.output(state.x, state.edges, state.tokens)
        for part in self.passes():
            x = part.map_output(x, state)
        return x

    def passes(self) -> list[DepthPass]:
        """Return what the stack does over its depth beside its blocks, in the order of the hooks."""
        parts: list[Any] = [getattr(self, name) for name in self.pass_names]
        return [part for part in parts if part is not None]

    def find(self, kind: type[PassT]) -> PassT | None:
        """Return the pass of that class; None: the stack has none."""
        return next((part for part in self.passes() if isinstance(part, kind)), None)

    def output_tokens(self, tokens: Tokens) -> Tokens:
        """Return the tokens of the output: `tokens`, or fewer."""
        for part in self.passes():
            tokens = part.output_tokens(tokens)
        return tokens

    def token_fractions(self) -> list[tuple[float, float]]:
        """Return the fractions of a sequence's tokens that are queries, and that are keys, of each block."""
        fractions = [(1.0, 1.0)] * len(self.blocks)
        for part in self.passes():
            fractions = part.token_fractions(fractions)
        return fractions

    def _pass_block(self, block: Any, state: DepthState) -> None:
        """Put the output of a block, and what it passes on, into the state."""
        tokens = self._tokens_of(block, state.tokens)
        if state.only_fills_cache:
            if tokens.forward.cache is None:
                return
            state.edges = block.fill_cache(
                state.x, tokens, state.edges, (state.memory, state.source)
            )
            return
        if state.tokens.forward.rng_seed is not None:
            # Each block's dropout is a function of (seed, step, micro-batch, block): the same on every layout, and a
            # resumed run needs no saved generator to draw what the uninterrupted run would have drawn.
            reseed(state.tokens.forward.rng_seed, block.path)
        inputs = (state.x, tokens, state.memory, state.source)
        if self.has_edges:
            state.x, state.edges = self.run_block(block, *inputs, state.edges)
        else:
            state.x = self.run_block(block, *inputs)
        if state.tokens.forward.stats is not None:
            state.tokens.forward.stats.add_recorded()

    def _tokens_of(self, block: Any, tokens: Tokens) -> Tokens:
        """Return the tokens as the block reads them.

        It draws numbers or none, from generators that are seeded already, and gets no seed: a compiled block takes an
        integer for a constant, and would be compiled anew for each micro-batch. Where its mixers are those of other
        blocks too, it has a cache of its own.
        """
        if tokens.forward.rng_seed is not None:
            tokens = tokens.with_forward(rng_seed=0)
        if not block.has_own_cache or tokens.forward.cache is None:
            return tokens
        return tokens.with_forward(cache=tokens.forward.cache.setdefault(block.path, {}))

    def first_edges(self) -> Edges:
        """Edges of the first block: none. A seam: a pipeline stage receives those of the stage before."""
        return {}

    def output(self, x: Any, edges: Edges, tokens: Tokens) -> Any:
        """Output [B, T, D] of the stack, for the stream x behind the last block. A seam: a pipeline stage sends the
        stream, and what its last block passes on beside it."""
        x = self.stream.end(x)
        return x if self.norm is None else self.norm(x, tokens)

    def run_block(self, block: Block, *inputs: Any) -> Any:
        """`block(*inputs)`. A seam: activation checkpointing."""
        return block(*inputs)
