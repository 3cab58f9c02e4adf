"""A stack of blocks, uniform or by rules: every second one a mixture of experts, sparse and dense attention in turn."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from xscale.core.config import Config, Slot
from xscale.core.errors import Problem
from xscale.nn.attention.core import share_layer_tables
from xscale.nn.block import ENDS_IN_NORM, NORMLESS, Block, BlockConfig, SublayerConfig
from xscale.nn.dims import Dims
from xscale.nn.early_exit import EARLY_EXIT, EarlyExit
from xscale.nn.edges import HandedOn, read_first_values
from xscale.nn.exits import Exits, ExitsConfig, Prediction, no_exits
from xscale.nn.ffn.ffn import FFNS, Ffn
from xscale.nn.gates import GATES, GateBudget
from xscale.nn.head.head import Head
from xscale.nn.layer_mix import LayerMix
from xscale.nn.mask_decoder import MaskDecoderConfig
from xscale.nn.mask_decoder import check as check_mask_decoder
from xscale.nn.mixer.mixer import MIXERS, Mixer
from xscale.nn.module import Module
from xscale.nn.norm.norm import NORMS, Norm
from xscale.nn.position.position import Position, share_position
from xscale.nn.quaternion import LinearMaps, use_quaternions
from xscale.nn.random import reseed
from xscale.nn.recurrent_depth import Halting, HaltingConfig, step_signal
from xscale.nn.reversible import Streams, upcast_copy
from xscale.nn.roles import Role, Seams
from xscale.nn.sequence_pooling import SequencePooling, SequencePoolingConfig, token_fractions
from xscale.nn.sharing import Share, share_sublayers
from xscale.nn.stack_checks import check_blocks_together
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
    depth: int = Field(default=4, ge=1, le=1024)
    """Number of blocks."""
    block: BlockConfig = BlockConfig()
    """The config of every block that no rule overrides."""
    rules: tuple[LayerRule, ...] = ()
    """Overrides for some blocks, by a pattern over the depth."""
    share: Share = "none"
    """The sublayers whose parameters all blocks have in common: none, all (Dehghani et al. 2019; ALBERT, Lan et al.
    2020), or as in ALBERT's ablation the mixer, with cross-attention, or the ffn; norms go with their sublayer."""

    linear_maps: LinearMaps = "real"
    """The linear maps of attention and feed-forward parts: real, or quaternion, by the Hamilton product with a quarter
    of the weights (Tay et al. 2019)."""
    step_signal: bool = False
    """Whether sinusoids of the position and of the block's number are added to the hidden states before each block
    (Dehghani et al. 2019, Universal Transformer)."""
    halting: HaltingConfig | None = None
    """Adaptive computation time (Graves 2016): each block is a step, after which tokens may halt; null: all tokens go
    through all blocks."""
    exits: ExitsConfig | None = None
    """Heads after inner blocks, whose losses are added to that of the model's head (early exit); null: none."""

    pooling: SequencePoolingConfig | None = None
    """Shortens the sequence of an encoder between blocks (Dai et al. 2020, Funnel-Transformer; the distilling of Zhou
    et al. 2021, Informer); null: all blocks read all tokens."""
    mask_decoder: MaskDecoderConfig | None = None
    """The last block of an encoder decodes masked tokens: its queries get absolute positions, and it is applied several
    times to the output of the block before (He et al. 2021, DeBERTa); null: it is a block as the others."""

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

    seams: ClassVar[Seams] = {
        "run_block": Role.BLOCK_CALL,
        "norm": Role.BETWEEN_REGIONS,
        "position": Role.IN_REGION,
        "core_tables": Role.IN_REGION,
        "position_tables": Role.BETWEEN_REGIONS,
        "shared": Role.SHARED_BY_BLOCKS,
        "first_handed_on": Role.HANDED_ON,
        "second_stream": Role.SECOND_STREAM,
        "output": Role.LAST_OUTPUT,
    }

    def __init__(
        self,
        config: StackConfig,
        dims: Dims,
        *,
        cross: bool = False,
        returns_states: bool = False,
        mix: LayerMix | None = None,
        make_head: Callable[[], Head] | None = None,
        repeats_pooled: bool = True,
    ) -> None:
        """`returns_states`: the output are the hidden states before and after all blocks [depth + 1, B, T, D], of which
        the stack with `mix` makes the memory of each of its blocks. `make_head` builds the head of an exit.
        `repeats_pooled`: the states of windows are repeated for the tokens in them, so that the output is [B, T, D]."""
        super().__init__()
        self.repeats_pooled = repeats_pooled
        self.returns_states = returns_states
        self.mix = mix
        dims = replace(dims, depth=config.depth)
        self.blocks = nn.ModuleDict(
            {
                str(layer): Block(
                    config.block_config(layer),
                    replace(dims, layer=layer),
                    cross=cross,
                    decoder=config.mask_decoder if layer + 1 == config.depth else None,
                )
                for layer in range(config.depth)
            }
        )
        self.position: Position | None = share_position(self.blocks.values())
        """The position part that all mixers have in common; None: each has its own."""
        self.core_tables: Module | None = share_layer_tables(self.blocks.values())
        """The parameters that all attention cores have in common; None: none."""
        self.position_tables: Module | None = share_layer_tables(self.blocks.values(), Position)
        """The parameters that the positions of all blocks have in common, where each has others; None: none."""
        if config.linear_maps == "quaternion":
            use_quaternions(self.blocks.values())
        self.shared: nn.ModuleDict | None = share_sublayers(self.blocks.values(), config.share)
        """The sublayers that all blocks have in common, by name; None: each block has its own."""
        self.gates: GateBudget | None = None
        if config.block.gates is not None:
            sublayers = sum(len(config.block_config(layer).listed(cross=cross)) for layer in range(config.depth))
            self.gates = GateBudget(config.block.gates, sublayers)
        mixers = [mixer for block in self.blocks.values() for mixer in block.mixers().values()]  # type: ignore[operator]
        self.hands_on = any(mixer.hands_on_scores or mixer.hands_on_values for mixer in mixers)
        """Whether attention scores or values pass from block to block, beside the hidden states."""
        read_first_values(mixers)
        self.reversible = config.block.residual == "reversible"
        """Whether blocks pass on two residual streams, and the output is their mean."""
        self.pooling = None if config.pooling is None else self._make_pooling(config.pooling, dims)
        self.step_signal = config.step_signal
        self.halting = None if config.halting is None else Halting(config.halting, dims)
        ends_in_norm = config.block.placement not in (*ENDS_IN_NORM, *NORMLESS)
        self.norm: Norm | None = NORMS.build(config.block.norm, dims.width) if ends_in_norm else None
        self.exits: Exits | None = None
        if config.exits is not None:
            assert make_head is not None, "`check` refuses exits of a stack without a head"
            norm = config.block.norm
            self.exits = Exits(config.exits, dims, lambda: NORMS.build(norm, dims.width), make_head)

    def _make_pooling(self, config: SequencePoolingConfig, dims: Dims) -> SequencePooling:
        for layer in config.before if config.queries_only else ():
            self._block(layer).pools_queries = True
        return SequencePooling(config, dims)

    @staticmethod
    def check(
        config: StackConfig, dims: Dims, path: str, *, cross: bool = False, predicts: bool = False
    ) -> list[Problem]:
        """List the problems of all blocks, each once. `predicts`: the model's head reads this stack's output alone."""
        hands_on = any(MIXERS.of(mixer).part.score_heads(mixer) for mixer in config.mixers())
        refused = no_exits(config, predicts=predicts, hands_on_scores=hands_on)
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
        decoder: list[Problem] = []
        if config.mask_decoder is not None:
            last = config.block_config(config.depth - 1)
            decoder = check_mask_decoder(config.mask_decoder, last, dims, f"{path}.mask_decoder", config)
        return [
            *problems.values(),
            *decoder,
            *check_blocks_together(config, dims, path, cross=cross, hands_on=hands_on),
            *Exits.check(config.exits, replace(dims, depth=config.depth), f"{path}.exits", refused=refused),
        ]

    def forward(
        self,
        x: Any,
        tokens: Tokens,
        memory: Tensor | None = None,
        source: Tokens | None = None,
        prediction: Prediction | None = None,
    ) -> Tensor:
        """`prediction` is what the exits predict; None: they do nothing."""
        handed_on, states = self.first_handed_on(), [x]
        memories = memory if self.mix is None or memory is None else self.mix(memory, tokens)
        if self.gates is not None:
            tokens, handed_on = self.gates.start(x, tokens, handed_on)
        leaving = None if self.exits is None else self.exits.leaving(tokens)
        pondered = None if self.halting is None else self.halting.start(x)
        pooled = None if self.pooling is None else self.pooling.start(tokens)
        if self.reversible:
            x = Streams(upcast_copy(x), self.second_stream(x))
        for layer in map(int, self.blocks):
            if leaving is not None and tokens.forward.target_weight is None and leaving.all_left():
                if tokens.forward.cache is None:
                    break
                handed_on = self._only_fill_cache(layer, x, tokens, prediction, leaving, handed_on)
                continue
            before = x
            memory = memories if self.mix is None or memories is None else memories[layer]
            if pooled is not None:
                x, memory, source = pooled.before_block(layer, x, len(self.blocks))
                tokens = pooled.stage_tokens
            x, handed_on = self._next(layer, x, tokens, memory, source, handed_on)
            if self.halting is not None and pondered is not None:
                x, pondered = self.halting.take_step(pondered, before, x, last=layer + 1 == len(self.blocks))
            if self.exits is not None:
                x = self.exits.after_block(layer, before, x, tokens, prediction, leaving)
            if self.returns_states:
                states.append(x)
        if self.returns_states:
            x = torch.stack(states)  # [depth + 1, B, T, D]
        if self.halting is not None and pondered is not None:
            x = self.halting.finish(pondered, tokens).to(x.dtype)
        if self.gates is not None:
            x = self.gates.attach_loss(x, handed_on[GATES], tokens)
        x = self.output(x, handed_on, tokens)
        return x if pooled is None or not self._repeats() else pooled.repeat(x)

    def _repeats(self) -> bool:
        """Whether the last block's output are states of windows, which are repeated."""
        return self.pooling is not None and self.repeats_pooled and not self.pooling.config.decoder_blocks

    def output_tokens(self, tokens: Tokens) -> Tokens:
        """Return the tokens of the output: `tokens`, or their windows."""
        return tokens if self.pooling is None or self.repeats_pooled else self.pooling.output_tokens(tokens)

    def token_fractions(self) -> list[tuple[float, float]]:
        """Return the fractions of a sequence's tokens that are queries, and that are keys, of each block."""
        return token_fractions(None if self.pooling is None else self.pooling.config, len(self.blocks))

    def _next(
        self, layer: int, x: Any, tokens: Tokens, memory: Tensor | None, source: Tokens | None, handed_on: HandedOn
    ) -> tuple[Any, HandedOn]:
        """Return the output of block `layer` for x [B, T, D], and what it hands on."""
        block = self._block(layer)
        if tokens.forward.rng_seed is not None:
            # Each block's dropout is a function of (seed, step, micro-batch, block): the same on every layout, and a
            # resumed run needs no saved generator to draw what the uninterrupted run would have drawn.
            reseed(tokens.forward.rng_seed, block.path)
        x, tokens = self._with_signal(layer, x, tokens), self._tokens_of(block, tokens)
        if self.hands_on or self.gates is not None:
            x, handed_on = self.run_block(block, x, tokens, memory, source, handed_on)
        else:
            x = self.run_block(block, x, tokens, memory, source)
        if tokens.forward.stats is not None:
            tokens.forward.stats.add_recorded()
        return x, handed_on

    def _only_fill_cache(
        self,
        layer: int,
        x: Tensor,
        tokens: Tokens,
        prediction: Prediction | None,
        leaving: EarlyExit,
        handed_on: HandedOn,
    ) -> HandedOn:
        """Store what later tokens read of x [B, T, D] in block `layer` and at its exit: all tokens have left."""
        block = self._block(layer)
        handed_on = block.fill_cache(self._with_signal(layer, x, tokens), self._tokens_of(block, tokens), handed_on)
        if leaving.reads_left() and self.exits is not None and prediction is not None:
            self.exits.leave(layer, x, tokens, prediction, leaving)
        return handed_on

    def _block(self, layer: int) -> Block:
        block = self.blocks[str(layer)]
        assert isinstance(block, Block)
        return block

    def _with_signal(self, layer: int, x: Any, tokens: Tokens) -> Any:
        """Return the hidden states x [B, T, D] with the signal of the step, which is counted from 1."""
        return x + step_signal(x, tokens, layer + 1) if self.step_signal else x

    def first_handed_on(self) -> HandedOn:
        """Scores and values for the first block: none. A seam: a pipeline stage receives those of the stage before."""
        return {}

    def second_stream(self, x: Tensor) -> Tensor:
        """Second residual stream of the first reversible block: a copy of the first, [B, T, D]. A seam: a pipeline
        stage receives that of the stage before."""
        return upcast_copy(x)

    def output(self, x: Any, handed_on: HandedOn, tokens: Tokens) -> Any:
        """Output [B, T, D] of the stack, from that of the last block. A seam: a pipeline stage also sends what its last
        block hands on, or both residual streams."""
        if self.reversible:
            x = self.use((x.first + x.second) / 2)
        return x if self.norm is None else self.norm(x, tokens)

    def _tokens_of(self, block: Block, tokens: Tokens) -> Tokens:
        """Return the tokens as the block reads them.

        It draws numbers or none, from generators that are seeded already, and gets no seed: a compiled block takes an
        integer for a constant, and would be compiled anew for each micro-batch. Where its mixers are those of other
        blocks too, it has a cache of its own.
        """
        if tokens.forward.rng_seed is not None:
            tokens = tokens.with_forward(rng_seed=0)
        if self.shared is None or tokens.forward.cache is None:
            return tokens
        return tokens.with_forward(cache=tokens.forward.cache.setdefault(block.path, {}))

    def run_block(self, block: Block, *inputs: Any) -> Any:
        """`block(*inputs)`. A seam: activation checkpointing."""
        return block(*inputs)


def predict(stack: nn.Module, x: Tensor, tokens: Tokens, prediction: Prediction) -> Tensor:
    """Return what the model's head makes of the output x [B, T, D] of its stack: logits, or the summed loss."""
    if tokens.get(EARLY_EXIT) is not None and prediction.targets is None and isinstance(stack, Stack) and stack.exits:
        return stack.exits.logits(x, tokens, prediction)
    if isinstance(stack, Stack) and stack.exits is not None:
        x = stack.exits.attach_second(x, tokens, prediction)
    out: Tensor = prediction.head(x, prediction.targets, tokens)
    if prediction.targets is None or not isinstance(stack, Stack) or stack.exits is None:
        return out
    return stack.exits.weigh_last(out, tokens)
