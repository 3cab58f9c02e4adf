"""A Transformer layer: sublayers on the residual stream, usually a mixer and a feed-forward part, with norms."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from xscale.core.config import Config, Slot
from xscale.core.errors import Problem
from xscale.nn.blocks.block_checks import (
    ENDS_IN_NORM,
    NORMLESS,
    check_parallel,
    check_parallel_sublayer,
    check_sublayer,
)
from xscale.nn.blocks.residual_gain import ResidualGain, ResidualWeight
from xscale.nn.blocks.reversible import Streams
from xscale.nn.depth.depth_pass import Edges
from xscale.nn.depth.edges import CONTENT, BlockEdges, Edge
from xscale.nn.depth.gates import Gate, GatesConfig
from xscale.nn.depth.gates import check as check_gates
from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import FFNS, Ffn, Gated
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import MIXERS, Mixer, check_mixer
from xscale.nn.module import Module
from xscale.nn.neighbours import NeighbourReader
from xscale.nn.norm.norm import NORMS, Norm, Rms
from xscale.nn.position.position import POSITIONS, Position, check_block_position
from xscale.nn.roles import Role, Seams
from xscale.nn.tokens import Tokens


class SublayerConfig(Config):
    part: Literal["mixer", "cross", "ffn"]
    """The kind of sublayer: the mixer, the cross-attention to the encoder's output, or the feed-forward part."""
    factor: float = Field(default=1.0, ge=0)
    """Factor of the sublayer's output before it is added: 0.5 for the halves of Macaron (Lu et al. 2019)."""
    parallel: bool = False
    """Whether it reads the input of the sublayer before it, so that both outputs are added to that input (So et al.
    2019, Evolved Transformer)."""
    mixer: Annotated[Mixer.Config, Slot(MIXERS)] | None = None
    """The mixer or cross-attention of this sublayer; null: the block's."""
    ffn: Annotated[Ffn.Config, Slot(FFNS)] | None = None
    """The feed-forward part of this sublayer; null: the block's."""

    @property
    def slot(self) -> Literal["mixer", "ffn"]:
        """The key with the config of the part."""
        return "ffn" if self.part == "ffn" else "mixer"


class BlockConfig(Config):
    mixer: Annotated[Mixer.Config, Slot(MIXERS)] = Attention.Config()
    """The mixer: self-attention or another map that moves information between tokens."""
    cross: Annotated[Mixer.Config, Slot(MIXERS)] | None = None
    """The cross-attention mixer in the decoder of an encoder-decoder; null: as `mixer`."""
    ffn: Annotated[Ffn.Config, Slot(FFNS)] = Gated.Config()
    """The position-wise feed-forward part."""
    sublayers: tuple[SublayerConfig, ...] | None = Field(default=None, min_length=1)
    """The sublayers in their order; null: the mixer, the cross-attention in the decoder of an encoder-decoder, and the
    feed-forward part."""
    position: Annotated[Position.Config, Slot(POSITIONS)] | None = None
    """Position encoding that is added to the block's input, with parameters of its own in each block (Al-Rfou et al.
    2019), except the dynamics of `floater`, which all blocks share (Liu et al. 2020); null: positions enter as
    `model.position` says, alone."""
    norm: Annotated[Norm.Config, Slot(NORMS)] = Rms.Config()
    """The norm of each sublayer."""
    placement: Literal["pre", "post", "admin", "sandwich", "res_post", "rezero", "no_norm", "none"] = "pre"
    """pre: x + f(norm(x)) (Xiong et al. 2020); post: norm(x + f(x)) (Vaswani et al. 2017);
    admin: norm(omega x + f(x)), learned gains omega [D] that a pass over the run's first batch initialises by the
    variance of the sublayers before (Liu et al. 2020);
    sandwich: x + norm(f(norm(x))) (Ding et al. 2021); res_post: x + norm(f(x)) (Liu et al. 2022, Swin v2);
    no_norm: x + f(x) (Huang et al. 2020, T-Fixup);
    rezero: x + alpha f(x), a learned scalar alpha that starts at 0 and no norm (Bachlechner et al. 2021);
    none: f(x), for mixers that are whole layers (Guo et al. 2019, Star-Transformer)."""
    residual: Literal["sequential", "parallel", "reversible"] = "sequential"
    """sequential: the ffn reads what the mixer wrote; parallel: both read the block's input, and their outputs are
    added to it (Wang and Komatsuzaki 2021, GPT-J); reversible: two residual streams, and a sublayer adds to one what it
    makes of the other, so that no block's input is saved for backward (Kitaev et al. 2020, Reformer)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of each sublayer's output."""
    gates: GatesConfig | None = None
    """Gates that decide for each token which sublayers are computed, under a budget (Bapna et al. 2020); null: all."""

    def listed(self, *, cross: bool = False) -> tuple[SublayerConfig, ...]:
        """Return the sublayers in their order; `cross`: the block reads an encoder's output."""
        if self.sublayers is not None:
            return self.sublayers
        ffn = (SublayerConfig(part="ffn", parallel=self.residual == "parallel"),) if self.ffn.kind != "none" else ()
        return (SublayerConfig(part="mixer"), *[SublayerConfig(part="cross")] * cross, *ffn)

    def named(self, *, cross: bool = False) -> dict[str, SublayerConfig]:
        """Return the sublayers by name, in their order: that of the part, the second of a part has `_2` behind it."""
        named: dict[str, SublayerConfig] = {}
        for sublayer in self.listed(cross=cross):
            count = 1 + sum(name.split("_")[0] == sublayer.part for name in named)
            named[sublayer.part if count == 1 else f"{sublayer.part}_{count}"] = sublayer
        return named

    def config_of(self, sublayer: SublayerConfig) -> Config:
        """Return the config of a sublayer's part: its own, or the block's."""
        if sublayer.part == "ffn":
            return sublayer.ffn or self.ffn
        return sublayer.mixer or (sublayer.part == "cross" and self.cross) or self.mixer

    def output_parts(self, dims: Dims) -> dict[str, Module]:
        """Build the parts of a sublayer that change its output before it is added to the residual stream, by name."""
        return {} if self.gates is None else {"gate": Gate(self.gates, dims.width, dims.init)}

    def mixers(self) -> list[Any]:
        """Return the configs of the mixers, without cross-attention."""
        return [self.config_of(sublayer) for sublayer in self.listed() if sublayer.part == "mixer"]


class Sublayer(Module):
    """A mixer or feed-forward part with its norm, dropout and residual connection."""

    seams: ClassVar[Seams] = {
        "random": Role.DRAWS_BETWEEN_REGIONS,
        "norm": Role.BETWEEN_REGIONS,
        "after": Role.BETWEEN_REGIONS,
        "part": Role.REGION,
        "mix": Role.SEQUENCE_MIXING,
    }

    def __init__(self, config: BlockConfig, dims: Dims, part: Mixer | Ffn, factor: float = 1.0) -> None:
        super().__init__()
        self.width = width = dims.width
        self.factor = factor
        self.placement = config.placement
        self.dropout = config.dropout
        normalises = config.placement not in NORMLESS
        self.norm: Norm | None = NORMS.build(config.norm, width) if normalises else None
        self.after: Norm | None = NORMS.build(config.norm, width) if config.placement == "sandwich" else None
        self.alpha = ResidualWeight() if config.placement == "rezero" else None
        self.omega = ResidualGain(width) if config.placement == "admin" else None
        output_parts = config.output_parts(dims)
        self.output_parts = tuple(output_parts)
        """Names of the parts that change the output: (y, x, tokens, edges) -> y, all [B, T, D]."""
        for name, changes in output_parts.items():
            setattr(self, name, changes)
        self.part = part

    def forward(
        self,
        x: Tensor,
        tokens: Tokens,
        memory: Tensor | None = None,
        source: Tokens | None = None,
        residual: Tensor | None = None,
        edge: Edge | None = None,
        edges: BlockEdges | None = None,
    ) -> Tensor:
        """[B, T, D] -> [B, T, D]: the part's output for `x`, added to `residual` [B, T, D]; None: to `x`.

        `edge` is that of the mixer among the block's `edges`.
        """
        if self.placement == "none":
            return self.branch(x, tokens, memory, source, edge)
        y = self._output(x, tokens, memory, source, edge)
        for name in self.output_parts:
            y = getattr(self, name)(y, x, tokens, edges)
        kernel = self.kernel_choices.get("bias_dropout_residual")
        residual = x if residual is None else residual
        if self.omega is not None:
            residual = self.omega(residual)
        y = self.random.dropout_add(y, residual, self._drop_probability(tokens), tokens, kernel)
        return y if self.placement not in ENDS_IN_NORM or self.norm is None else self.norm(y, tokens)

    def branch(
        self,
        x: Tensor,
        tokens: Tokens,
        memory: Tensor | None = None,
        source: Tokens | None = None,
        edge: Edge | None = None,
    ) -> Tensor:
        """[B, T, D] -> [B, T, D]: the part's output for `x` in compute dtype, with norm and dropout."""
        y = self._output(self.use(x), tokens, memory, source, edge)
        return self.random.dropout(y, self._drop_probability(tokens), ("batch", "tokens", "width"), tokens)

    def _drop_probability(self, tokens: Tokens) -> float:
        return self.dropout if self.training and tokens.forward.rng_seed is not None else 0.0

    def normalised_input(self, x: Tensor, tokens: Tokens | None) -> Tensor:
        """Return what the part reads of x [B, T, D]: its norm, with placement pre or sandwich."""
        return x if self.placement not in ("pre", "sandwich") or self.norm is None else self.norm(x, tokens)

    def _output(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None, source: Tokens | None, edge: Edge | None
    ) -> Tensor:
        """Output of the part with its norm, before dropout, [B, T, D]."""
        x, is_mixer = self.normalised_input(x, tokens), isinstance(self.part, Mixer)
        y: Tensor = self.mix(x, tokens, memory, source, edge=edge) if is_mixer else self.part(x, tokens)
        if self.after is not None:
            y = self.after(y, tokens)
        elif self.placement == "res_post" and self.norm is not None:
            y = self.norm(y, tokens)
        elif self.alpha is not None:
            y = self.alpha(y)
        return y if self.factor == 1 else self.factor * y

    def mix(self, x: Tensor, tokens: Tokens, *memory_and_source: Any, edge: Edge | None) -> Tensor:
        """Run the mixer, [B, T, D] -> [B, T, D]. A seam: context parallelism gathers the sequence."""
        edges = {} if edge is None else {"edge": edge}
        return self.part(x, tokens, *memory_and_source, **edges)  # type: ignore[no-any-return]


class Block(Module):
    """[B, T, D] -> [B, T, D]. Sublayers have the names of `BlockConfig.named`."""

    seams: ClassVar[Seams] = {"position": Role.BLOCK_POSITION, "add_branch": Role.RESIDUAL_SUM}
    mixer: Sublayer
    cross: Sublayer | None
    ffn: Sublayer | None

    def __init__(self, config: BlockConfig, dims: Dims, *, cross: bool = False) -> None:
        super().__init__()
        self.rounds = 1
        """Times that the sublayers are gone through."""
        self.reads_own_input = False
        """Whether `memory` is the block's own input, without its position and earlier rounds."""
        self.has_own_cache = False
        """Whether its mixers are those of other blocks too, so that it keeps its own part of the cache."""
        self.reversible = config.residual == "reversible"
        self.position: Position | None = None if config.position is None else POSITIONS.build(config.position, dims)
        self.cross = self.ffn = None
        named = config.named(cross=cross)
        self.order = list(named)
        """Names of the sublayers, in their order."""
        self.parallel_sublayers = frozenset(name for name, sublayer in named.items() if sublayer.parallel)
        """Names of those that read the input of the one before."""
        self.reads_memory = frozenset(name for name in named if name.startswith("cross"))
        """Names of the sublayers whose keys and values are of `memory`."""
        for name, sublayer in named.items():
            inner = cross_dims(dims) if sublayer.part == "cross" else dims
            part = (FFNS if sublayer.part == "ffn" else MIXERS).build(config.config_of(sublayer), inner)
            setattr(self, name, Sublayer(config, dims, part, sublayer.factor))

    @staticmethod
    def check(config: BlockConfig, dims: Dims, path: str, *, cross: bool = False) -> list[Problem]:
        """List the problems of the block and its parts."""
        problems = check_parallel(config, path, cross=cross) if config.residual == "parallel" else []
        for index, sublayer in enumerate(config.listed(cross=cross)):
            slot, part = sublayer.slot, config.config_of(sublayer)
            entry = f"{path}.sublayers.{index}"
            at = f"{path}.{sublayer.part}" if getattr(sublayer, slot) is None else f"{entry}.{slot}"
            if config.sublayers is not None:
                problems += check_sublayer(sublayer, config, entry, cross=cross)
            if config.sublayers is not None and sublayer.parallel:
                problems += check_parallel_sublayer(config, index, entry)
            if slot == "ffn":
                problems += FFNS.of(part).part.check(part, dims, at)
            elif sublayer.part == "mixer" or cross:
                problems += check_mixer(part, cross_dims(dims) if sublayer.part == "cross" else dims, at)
        problems += NORMS.of(config.norm).part.check(config.norm, dims, f"{path}.norm")
        problems += check_gates(config.gates, config.residual, config.placement, f"{path}.gates")
        return problems + check_block_position(config.position, dims, f"{path}.position")

    def sublayers(self) -> dict[str, Sublayer]:
        """Return the sublayers by name, in their order; those that blocks share belong to the stack."""
        return {name: getattr(self, name) for name in self.order}

    def mixers(self) -> dict[str, Mixer]:
        """Return the mixers by the name of their sublayer, in their order."""
        parts: dict[str, Any] = {name: sublayer.part for name, sublayer in self.sublayers().items()}
        return {name: part for name, part in parts.items() if isinstance(part, Mixer)}

    def forward(
        self,
        x: Any,
        tokens: Tokens,
        memory: Tensor | None = None,
        source: Tokens | None = None,
        received: Edges | None = None,
    ) -> Any:
        """Return the hidden states; with edges `received` from the block before (hidden states, those of this one).

        `x` are hidden states [B, T, D], or the `Streams` of a reversible block, which returns streams.
        """
        if self.reversible:
            return self._next_streams(x, tokens, memory, source)
        if self.reads_own_input:
            memory, source = x, tokens
        if self.position is not None:
            x = self.position.embed(x, tokens)
        for _ in range(self.rounds - 1):
            x = self._through(self.order, x, tokens, (memory, source))
        edges = BlockEdges(received, {} if received is None else self.mixers())
        x = self._through(self.order, x, tokens, (memory, source), edges)
        return x if received is None else (x, edges.next())

    def _through(
        self,
        names: Sequence[str],
        x: Tensor,
        tokens: Tokens,
        memory: tuple[Tensor | None, Tokens | None] = (None, None),
        edges: BlockEdges | None = None,
    ) -> Tensor:
        """Output [B, T, D] of sublayers `names`; `memory`: what some read as keys and values, with its tokens."""
        before = x
        edges = edges or BlockEdges(None, {})
        for name in names:
            before, residual = (before, x) if name in self.parallel_sublayers else (x, None)
            keys = self._keys_of(name, tokens, *memory)
            x = getattr(self, name)(before, tokens, *keys, residual=residual, edge=edges.of(name), edges=edges)
        return x

    def _keys_of(self, name: str, tokens: Tokens, memory: Tensor | None, source: Tokens | None) -> tuple[Any, ...]:
        """Return of what the sublayer makes keys and values, with its tokens; empty: of what it reads itself."""
        content, is_mixer = tokens.get(CONTENT), name.startswith("mixer")
        if content is not None and is_mixer:
            memory, source = content, tokens
        elif name not in self.reads_memory or memory is None:
            return ()
        return (getattr(self, name).normalised_input(memory, source) if is_mixer else memory), source

    def _next_streams(self, streams: Streams, tokens: Tokens, memory: Tensor | None, source: Tokens | None) -> Streams:
        first, second = streams
        for name in self.order:
            memory_and_source = (memory, source) if name.startswith("cross") else ()
            y = self.add_branch(getattr(self, name), first, second, tokens, *memory_and_source)
            first, second = second, y
        return Streams(first, second)

    def add_branch(self, sublayer: Sublayer, first: Tensor, second: Tensor, *inputs: Any) -> Tensor:
        """first + f(second), all [B, T, D]. A seam: `first` is freed, and reconstructed in backward."""
        return first + sublayer.branch(second, *inputs)

    def fill_cache(
        self, x: Tensor, tokens: Tokens, received: Edges, memory: tuple[Tensor | None, Tokens | None] = (None, None)
    ) -> Edges:
        """Store in the cache what later tokens read of x [B, T, D], the states of tokens that have left the stack.

        The sublayers behind the last that keeps anything, which only this block's output would need, are not computed.
        Return the edges of the block.
        """
        if self.position is not None:
            x = self.position.embed(x, tokens)
        edges, last = BlockEdges(received, self.mixers()), -1
        for index, name in enumerate(self.order):
            parts = getattr(self, name).modules()
            if name.startswith("mixer") or any(isinstance(part, NeighbourReader) for part in parts):
                last = index
        self._through(self.order[: last + 1], x, tokens, memory, edges)
        return edges.next()


def cross_dims(dims: Dims) -> Dims:
    """`dims` for a cross-attention part."""
    return replace(dims, cross=True)
