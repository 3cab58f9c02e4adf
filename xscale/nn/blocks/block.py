"""A Transformer layer: sublayers on the residual stream, usually a mixer and a feed-forward part."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from xscale.core.config import Config, FractionBelowOne, NonNegativeFloat, Slot
from xscale.core.errors import Problem
from xscale.nn.blocks.block_checks import check_parallel_sublayer, check_sublayer
from xscale.nn.depth.depth_pass import Edges
from xscale.nn.depth.edges import CONTENT, BlockEdges
from xscale.nn.depth.gates import Gate, GatesConfig
from xscale.nn.depth.gates import check as check_gates
from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import FFNS, FfnSlot, Gated
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import MIXERS, Mixer, MixerSlot, check_mixer
from xscale.nn.module import Module
from xscale.nn.neighbours import NeighbourReader
from xscale.nn.norm.norm import NORMS, NormSlot, Rms
from xscale.nn.position.position import POSITIONS, Position, PositionSlot, check_block_position
from xscale.nn.residual.norms import Pre
from xscale.nn.residual.residual_stream import RESIDUALS, ResidualStream, fold_placement
from xscale.nn.residual.sublayer import Sublayer
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


class SublayerConfig(Config):
    part: Literal["mixer", "cross", "ffn"]
    """The kind of sublayer: the mixer, the cross-attention to the encoder's output, or the feed-forward part."""
    factor: NonNegativeFloat = 1.0
    """Factor of the sublayer's output before it is added: 0.5 for the halves of Macaron (Lu et al. 2019)."""
    parallel: bool = False
    """Whether it reads the input of the sublayer before it, so that both outputs are added to that input (So et al.
    2019, Evolved Transformer)."""
    mixer: MixerSlot | None = None
    """The mixer or cross-attention of this sublayer; null: the block's."""
    ffn: FfnSlot | None = None
    """The feed-forward part of this sublayer; null: the block's."""

    @property
    def slot(self) -> Literal["mixer", "ffn"]:
        """The key with the config of the part."""
        return "ffn" if self.part == "ffn" else "mixer"


class BlockConfig(Config):
    folded = {"placement": ("residual", fold_placement)}

    mixer: MixerSlot = Attention.Config()
    """The mixer: self-attention or another map that moves information between tokens."""
    cross: MixerSlot | None = None
    """The cross-attention mixer in the decoder of an encoder-decoder; null: as `mixer`."""
    ffn: FfnSlot = Gated.Config()
    """The position-wise feed-forward part."""
    sublayers: tuple[SublayerConfig, ...] | None = Field(default=None, min_length=1)
    """The sublayers in their order; null: the mixer, the cross-attention in the decoder of an encoder-decoder, and the
    feed-forward part."""
    position: PositionSlot | None = None
    """Position encoding that is added to the block's input, with parameters of its own in each block (Al-Rfou et al.
    2019), except the dynamics of `floater`, which all blocks share (Liu et al. 2020); null: positions enter as
    `model.position` says, alone."""
    norm: NormSlot = Rms.Config()
    """The norm of each sublayer."""
    residual: Annotated[ResidualStream.Config, Slot(RESIDUALS)] = Pre.Config()
    """The residual stream: how sublayers read from it and write to it, and where norms stand. All blocks of a stack
    have the same."""
    dropout: FractionBelowOne = 0.0
    """Dropout probability of each sublayer's output."""
    gates: GatesConfig | None = None
    """Gates that decide for each token which sublayers are computed, under a budget (Bapna et al. 2020); null: all."""

    def listed(self, *, cross: bool = False) -> tuple[SublayerConfig, ...]:
        """Return the sublayers in their order; `cross`: the block reads an encoder's output."""
        if self.sublayers is not None:
            return self.sublayers
        parallel = RESIDUALS.of(self.residual).part.joins_sublayers
        ffn = (SublayerConfig(part="ffn", parallel=parallel),) if self.ffn.kind != "none" else ()
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


class Block(Module):
    """[B, T, D] -> [B, T, D]. Sublayers have the names of `BlockConfig.named`."""

    seams = {"position": Role.BLOCK_POSITION}
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
        self.position: Position | None = (
            None if config.position is None else POSITIONS.build(config.position, dims)
        )
        self.cross = self.ffn = None
        named = config.named(cross=cross)
        self.order = list(named)
        """Names of the sublayers, in their order."""
        self.parallel_sublayers = frozenset(
            name for name, sublayer in named.items() if sublayer.parallel
        )
        """Names of those that read the input of the one before."""
        self.reads_memory = frozenset(name for name in named if name.startswith("cross"))
        """Names of the sublayers whose keys and values are of `memory`."""
        stream = RESIDUALS.of(config.residual).part
        placement = stream.placement(config.residual)
        for number, (name, sublayer) in enumerate(named.items(), dims.sublayers_before):
            inner = cross_dims(dims) if sublayer.part == "cross" else dims
            part = (FFNS if sublayer.part == "ffn" else MIXERS).build(
                config.config_of(sublayer), inner
            )
            setattr(
                self, name, stream.sublayer(config, placement, dims, part, sublayer.factor, number)
            )

    @staticmethod
    def check(config: BlockConfig, dims: Dims, path: str, *, cross: bool = False) -> list[Problem]:
        """List the problems of the block and its parts."""
        stream = RESIDUALS.of(config.residual).part
        problems: list[Problem] = stream.check(config.residual, dims, f"{path}.residual")
        problems += stream.check_block(config, path, cross=cross)
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
                problems += check_mixer(
                    part, cross_dims(dims) if sublayer.part == "cross" else dims, at
                )
        problems += NORMS.of(config.norm).part.check(config.norm, dims, f"{path}.norm")
        problems += check_gates(config.gates, config.residual, f"{path}.gates")
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
        """Return the residual stream behind the block, for the one before it, x: hidden states [B, T, D] or others.

        With edges `received` from the block before: return the stream, and those of this block.
        """
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
        x: Any,
        tokens: Tokens,
        memory: tuple[Tensor | None, Tokens | None] = (None, None),
        edges: BlockEdges | None = None,
    ) -> Any:
        """Return the stream behind sublayers `names`; `memory`: what some read as keys and values, with its tokens."""
        before = x
        edges = edges or BlockEdges(None, {})
        for name in names:
            before, residual = (before, x) if name in self.parallel_sublayers else (x, None)
            keys = self._keys_of(name, tokens, *memory)
            x = getattr(self, name)(
                before, tokens, *keys, residual=residual, edge=edges.of(name), edges=edges
            )
        return x

    def _keys_of(
        self, name: str, tokens: Tokens, memory: Tensor | None, source: Tokens | None
    ) -> tuple[Any, ...]:
        """Return of what the sublayer makes keys and values, with its tokens; empty: of what it reads itself."""
        content, is_mixer = tokens.get(CONTENT), name.startswith("mixer")
        if content is not None and is_mixer:
            memory, source = content, tokens
        elif name not in self.reads_memory or memory is None:
            return ()
        return (
            getattr(self, name).normalised_input(memory, source) if is_mixer else memory
        ), source

    def fill_cache(
        self,
        x: Any,
        tokens: Tokens,
        received: Edges,
        memory: tuple[Tensor | None, Tokens | None] = (None, None),
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
