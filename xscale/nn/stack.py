"""A stack of blocks, uniform or by rules: every second one a mixture of experts, sparse and dense attention in turn."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from xscale.core.config import Config, Slot
from xscale.core.errors import Problem
from xscale.nn.attention.core import CORES, share_layer_tables
from xscale.nn.block import ENDS_IN_NORM, NORMLESS, Block, BlockConfig, Scores, SublayerConfig
from xscale.nn.dims import Dims
from xscale.nn.early_exit import EarlyExit
from xscale.nn.exits import Exits, ExitsConfig, Prediction, no_exits
from xscale.nn.ffn.ffn import FFNS, Ffn
from xscale.nn.gates import GATES, GateBudget
from xscale.nn.head import Head
from xscale.nn.layer_mix import LayerMix
from xscale.nn.mask_decoder import MaskDecoderConfig
from xscale.nn.mask_decoder import check as check_mask_decoder
from xscale.nn.mixer.mixer import MIXERS, Mixer
from xscale.nn.module import Module
from xscale.nn.norm import NORMS, Norm
from xscale.nn.position.position import Position, share_position
from xscale.nn.quaternion import LinearMaps, use_quaternions
from xscale.nn.quaternion import check as check_quaternions
from xscale.nn.random import reseed
from xscale.nn.recurrent_depth import Halting, HaltingConfig, step_signal
from xscale.nn.reversible import Streams, upcast_copy
from xscale.nn.reversible import check as check_reversible
from xscale.nn.sharing import Share, share_sublayers
from xscale.nn.sharing import check as check_sharing
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

    seams: ClassVar[tuple[str, ...]] = (
        "run_block", "norm", "position", "core_tables", "position_tables", "shared", "first_scores", "second_stream",
        "output",
    )  # fmt: skip

    def __init__(
        self,
        config: StackConfig,
        dims: Dims,
        *,
        cross: bool = False,
        returns_states: bool = False,
        mix: LayerMix | None = None,
        make_head: Callable[[], Head] | None = None,
    ) -> None:
        """`returns_states`: the output are the hidden states before and after all blocks [depth + 1, B, T, D], of which
        the stack with `mix` makes the memory of each of its blocks. `make_head` builds the head of an exit."""
        super().__init__()
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
        """The parameters that the positions at the inputs of all blocks have in common; None: none."""
        if config.linear_maps == "quaternion":
            use_quaternions(self.blocks.values())
        self.shared: nn.ModuleDict | None = share_sublayers(self.blocks.values(), config.share)
        """The sublayers that all blocks have in common, by name; None: each block has its own."""
        self.gates: GateBudget | None = None
        if config.block.gates is not None:
            sublayers = sum(len(config.block_config(layer).listed(cross=cross)) for layer in range(config.depth))
            self.gates = GateBudget(config.block.gates, sublayers)
        self.hands_on_scores = any(block.score_mixers() for block in self.blocks.values())  # type: ignore[operator]
        """Whether attention scores pass from block to block, beside the hidden states."""
        self.reversible = config.block.residual == "reversible"
        """Whether blocks pass on two residual streams, and the output is their mean."""
        self.step_signal = config.step_signal
        self.halting = None if config.halting is None else Halting(config.halting, dims)
        ends_in_norm = config.block.placement not in (*ENDS_IN_NORM, *NORMLESS)
        self.norm: Norm | None = NORMS.build(config.block.norm, dims.width) if ends_in_norm else None
        self.exits: Exits | None = None
        if config.exits is not None:
            assert make_head is not None, "`check` refuses exits of a stack without a head"
            norm = config.block.norm
            self.exits = Exits(config.exits, dims, lambda: NORMS.build(norm, dims.width), make_head)

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
            *_check_parts(config, path, cross=cross),
            *_check_shared_position(config, dims, path),
            *_check_layer_tables(config, dims, path),
            *_check_scores(config, path, cross=cross),
            *check_sharing(config, path, cross=cross),
            *check_reversible(config, path),
            *check_quaternions(config, dims.width, path, cross=cross),
            *_check_steps(config, dims, path),
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
        scores, states = self.first_scores(), [x]
        memories = memory if self.mix is None or memory is None else self.mix(memory, tokens)
        if self.gates is not None:
            tokens, scores = self.gates.start(x, tokens, scores)
        leaving = None if self.exits is None else self.exits.leaving(tokens)
        pondered = None if self.halting is None else self.halting.start(x)
        if self.reversible:
            x = Streams(upcast_copy(x), self.second_stream(x))
        for layer in map(int, self.blocks):
            if leaving is not None and tokens.target_weight is None and leaving.all_left():
                if tokens.cache is None:
                    break
                self._only_fill_cache(layer, x, tokens, prediction, leaving)
                continue
            before = x
            memory = memories if self.mix is None or memories is None else memories[layer]
            x, scores = self._next(layer, x, tokens, memory, source, scores)
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
            x = self.gates.attach_loss(x, scores[GATES], tokens)
        return self.output(x, scores, tokens)  # type: ignore[no-any-return]

    def _next(
        self, layer: int, x: Any, tokens: Tokens, memory: Tensor | None, source: Tokens | None, scores: Scores
    ) -> tuple[Any, Scores]:
        """Return the output of block `layer` for x [B, T, D], and the scores that it hands on."""
        block = self._block(layer)
        if tokens.rng_seed is not None:
            # Each block's dropout is a function of (seed, step, micro-batch, block): the same on every layout, and a
            # resumed run needs no saved generator to draw what the uninterrupted run would have drawn.
            reseed(tokens.rng_seed, block.path)
        x, tokens = self._with_signal(layer, x, tokens), self._tokens_of(block, tokens)
        if self.hands_on_scores or self.gates is not None:
            x, scores = self.run_block(block, x, tokens, memory, source, scores)
            return x, scores
        return self.run_block(block, x, tokens, memory, source), scores

    def _only_fill_cache(
        self, layer: int, x: Tensor, tokens: Tokens, prediction: Prediction | None, leaving: EarlyExit
    ) -> None:
        """Store what later tokens read of x [B, T, D] in block `layer` and at its exit: all tokens have left."""
        block = self._block(layer)
        block.fill_cache(self._with_signal(layer, x, tokens), self._tokens_of(block, tokens))
        if leaving.reads_left() and self.exits is not None and prediction is not None:
            self.exits.leave(layer, x, tokens, prediction, leaving)

    def _block(self, layer: int) -> Block:
        block = self.blocks[str(layer)]
        assert isinstance(block, Block)
        return block

    def _with_signal(self, layer: int, x: Any, tokens: Tokens) -> Any:
        """Return the hidden states x [B, T, D] with the signal of the step, which is counted from 1."""
        return x + step_signal(x, tokens, layer + 1) if self.step_signal else x

    def first_scores(self) -> Scores:
        """Attention scores for the first block: none. A seam: a pipeline stage receives those of the stage before."""
        return {}

    def second_stream(self, x: Tensor) -> Tensor:
        """Second residual stream of the first reversible block: a copy of the first, [B, T, D]. A seam: a pipeline
        stage receives that of the stage before."""
        return upcast_copy(x)

    def output(self, x: Any, scores: Scores, tokens: Tokens) -> Any:
        """Output [B, T, D] of the stack, from that of the last block. A seam: a pipeline stage also sends scores, or
        both residual streams."""
        if self.reversible:
            x = self.use((x.first + x.second) / 2)
        return x if self.norm is None else self.norm(x, tokens)

    def _tokens_of(self, block: Block, tokens: Tokens) -> Tokens:
        """Return the tokens with a cache of the block's own where its mixers are those of other blocks too."""
        if self.shared is None or tokens.cache is None:
            return tokens
        return replace(tokens, cache=tokens.cache.setdefault(block.path, {}))

    def run_block(self, block: Block, *inputs: Any) -> Any:
        """`block(*inputs)`. A seam: activation checkpointing."""
        return block(*inputs)


def predict(stack: nn.Module, x: Tensor, tokens: Tokens, prediction: Prediction) -> Tensor:
    """Return what the model's head makes of the output x [B, T, D] of its stack: logits, or the summed loss."""
    if tokens.early_exit is not None and prediction.targets is None and isinstance(stack, Stack) and stack.exits:
        return stack.exits.logits(x, tokens, prediction)
    if isinstance(stack, Stack) and stack.exits is not None:
        x = stack.exits.attach_second(x, tokens, prediction)
    out: Tensor = prediction.head(x, prediction.targets, tokens)
    if prediction.targets is None or not isinstance(stack, Stack) or stack.exits is None:
        return out
    return stack.exits.weigh_last(out, tokens)


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


def _check_steps(config: StackConfig, dims: Dims, path: str) -> list[Problem]:
    """Check what is added before and after each block."""
    problems = []
    if config.step_signal and dims.width % 2:
        what = f"pairs of channels have a sine and a cosine, and width={dims.width} is odd"
        problems.append(Problem(f"{path}.step_signal", what, "Take an even width, or false."))
    hands_on_scores = any(MIXERS.of(mixer).part.score_heads(mixer) for mixer in config.mixers())
    if config.halting is not None and hands_on_scores:
        what = "a token that has halted has no scores to hand on"
        problems.append(Problem(f"{path}.halting", what, "Take null, or the core softmax."))
    norm = NORMS.of(config.block.norm)
    if config.exits is not None and config.exits.norm and norm.traits.batch_statistics:
        what = f"'{norm.name}' collects statistics in every step, and an exit does not see the tokens of every step"
        problems.append(Problem(f"{path}.exits.norm", what, "Take false, or another block.norm."))
    if config.block.residual == "reversible" and hands_on_scores:
        what = "reversible blocks keep nothing for backward, and scores that blocks hand on would be kept"
        problems.append(Problem(f"{path}.block.residual", what, "Take sequential, or the core softmax."))
    return problems


def _check_scores(config: StackConfig, path: str, *, cross: bool) -> list[Problem]:
    """Check that each mixer which reads the scores of the previous block gets those of as many heads."""
    problems = []
    previous: dict[str, int | None] = {}
    for layer in range(config.depth):
        block = config.block_config(layer)
        heads: dict[str, int | None] = {}
        for name, sublayer in block.named(cross=cross).items():
            if sublayer.part == "ffn":
                continue
            mixer: Any = block.config_of(sublayer)
            part = MIXERS.of(mixer).part
            heads[name] = part.score_heads(mixer)
            if part.reads_scores(mixer) and (layer > 0 or part.needs_previous_scores):
                available = previous.get(name)
                if available is None:
                    what = f"'{name}' reads the attention scores of the block before, which hands on none"
                    can = ", ".join(CORES.able(previous_scores=True))
                    fix = f"Give that block the mixer attention with one of these cores: {can}."
                    problems.append(Problem(f"{path} (block {layer})", what, fix))
                elif available != heads[name]:
                    what = f"'{name}' has {heads[name]} heads and reads the scores of the {available} before it"
                    problems.append(Problem(f"{path} (block {layer})", what, f"Take heads={available}."))
        previous = heads
    return problems[:1]


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
