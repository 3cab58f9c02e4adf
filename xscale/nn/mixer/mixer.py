"""Mixers: layers that move information between tokens, x -> x. `fourier`; `attention` is in a file of its own."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from xscale.core.choices import Choice
from xscale.core.config import Config, Slot
from xscale.core.errors import Problem
from xscale.core.registry import Family
from xscale.core.requirements import instead, kinds, must_divide, take
from xscale.nn.attention.core import CORES
from xscale.nn.dims import Dims
from xscale.nn.mixer.without_padding import without_padding
from xscale.nn.module import Module, Part
from xscale.nn.position.position import POSITIONS
from xscale.nn.tokens import Tokens


@dataclass(frozen=True)
class MixerTraits:
    """Properties that a mixer declares and the conformance suite checks. Those of attention are its core's."""

    causal: bool
    """Can mask later tokens."""
    bidirectional: bool
    """Can see earlier and later tokens."""
    cross: bool
    """Can do cross attention."""
    documents: bool
    """Masks packed documents from each other."""
    decode: bool
    """Has an incremental form that equals the parallel one."""
    padding: bool = False
    """Without `documents`, hides the padding at the end of samples (`Tokens.padding`)."""
    prefix: bool = False
    """In a causal model, lets all tokens of a document see its prefix (`Tokens.prefix`), where its core can."""
    static_decode: bool = False
    """Has a static form of a step of generation (`Module.why_not_static`), where its core has."""


CAUSAL_OR_BIDIRECTIONAL = MixerTraits(
    causal=True, bidirectional=True, cross=False, documents=True, decode=True
)
"""Traits of a mixer of both kinds of models, as self-attention is. One that differs declares `replace(...)` of them."""
CAUSAL = replace(CAUSAL_OR_BIDIRECTIONAL, bidirectional=False)
"""Traits of a recurrence over the tokens so far."""
BIDIRECTIONAL = MixerTraits(
    causal=False, bidirectional=True, cross=False, documents=False, decode=False, padding=True
)
"""Traits of a mixer that is a function of the full sequence, for encoders alone."""


@dataclass(frozen=True)
class RefusedPositions:
    """The requirement of a mixer that no position encoding of some kinds acts in it."""

    where: tuple[str, ...]
    """Traits `where` of the encodings that it refuses."""
    why: str
    """A clause after "position 'KIND'"."""


ACTS_INSIDE = ("qk", "bias", "scores")
"""Traits `where` of the position encodings that act in a mixer."""


class Mixer(Part):
    """Built as `Mixer(config, dims)`."""

    refused_positions: ClassVar[RefusedPositions | None] = None
    """Position encodings, of the model or its own, that cannot act in it."""

    uses_position: ClassVar[bool] = True
    """Whether the model's position encoding acts in it, if that acts on queries and keys or on scores."""
    needs_previous_scores: ClassVar[bool] = False
    """Whether it has no scores of its own, so that it cannot be in the first block."""
    holds_core: ClassVar[bool] = False
    """Whether it has an attention core, so that the mixer `attention` can stand in its place."""
    shards_sequence: ClassVar[bool] = False
    """Whether it works on a sequence that is sharded over cp."""
    heads_make_width: ClassVar[bool] = False
    """Whether the heads make up the model's width, where their own width is not given."""
    reads_padding: bool = False
    """Whether it reads the padding at the end of samples as text."""
    reads_bias: ClassVar[bool] = False
    """Whether it reads the mask's bias on the scores, or attention weights, so that it needs the bias by pair."""

    @classmethod
    def check(cls, config: Any, dims: Dims, path: str) -> list[Problem]:
        """List the problems of the config; a mixer that overrides it begins with these."""
        problems = super().check(config, dims, path) + cls._check_position_acts(config, dims, path)
        return problems + (cls.check_heads(config, dims, path) if cls.heads_make_width else [])

    @classmethod
    def check_heads(cls, config: Any, dims: Dims, path: str) -> list[Problem]:
        """List why the heads do not make up the width, where their own width is not given."""
        if getattr(config, "head_width", None) is not None:
            return []
        widths = take(max(dims.width // config.heads, 1), key=f"{path}.head_width")
        alternatives = widths if hasattr(config, "head_width") else ()
        return must_divide(path, "heads", config.heads, "width", dims.width, *alternatives)

    @classmethod
    def why_not_position(cls, position: Any) -> str | None:
        """Return why a position encoding with this config cannot act in it, a clause after its kind; None: it can."""
        refused = cls.refused_positions
        is_refused = refused is not None and POSITIONS.of(position).traits.where in refused.where
        return refused.why if refused is not None and is_refused else None

    @classmethod
    def _check_position_acts(cls, config: Any, dims: Dims, path: str) -> list[Problem]:
        own_position = getattr(config, "position", None)
        position = own_position or dims.position
        # Positions of two sequences are not comparable, so cross attention has no position encoding.
        if position is None or dims.cross or (why := cls.why_not_position(position)) is None:
            return []
        where = "model.position" if own_position is None else f"{path}.position"
        able = [
            entry.name for entry in POSITIONS if cls.why_not_position(entry.part.Config()) is None
        ]
        if own_position is not None:
            able = [name for name in able if POSITIONS.get(name).traits.where != "input"]
        choices = kinds(able, where)
        if cls.holds_core:
            choices += take("attention", key=f"{path}.kind")
        return [Problem(where, f"position '{position.kind}' {why}", choices=choices)]

    def forward(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        """[B, T, D] -> [B, T, D]; cross attention also reads `memory` [B, S, D], the hidden states of `source`."""
        raise NotImplementedError

    @property
    def decodes(self) -> bool:
        """Whether it computes new tokens from the cache of those before. The trait of a mixer covers its parts."""
        kind = self.Config.kind
        return kind is None or MIXERS.get(kind).traits.decode

    def why_not_static(self) -> str | None:
        kind = self.Config.kind
        if kind is None or MIXERS.get(kind).traits.static_decode:
            return None
        return f"mixer '{kind}' keeps a state of its own"

    @property
    def hands_on_scores(self) -> bool:
        """Whether `forward` takes the keyword `edge`, a ScoreEdge: the previous block's attention scores, and room for
        its own."""
        return False

    @property
    def previous_score_heads(self) -> int:
        """Heads, over all ranks, whose scores of the previous block the output depends on; 0: on none."""
        return 0

    @property
    def hands_on_values(self) -> bool:
        """Whether `forward` takes the keyword `edge`, a ValueEdge: the values of the first such mixer of the stack,
        which writes them, and whose gradient is a sum over the layers."""
        return False

    def mix_first_values(self) -> None:
        """Declare what mixes the values of the first layer into this one's: the stack calls it for all mixers that
        hand on values, except the first."""
        raise NotImplementedError

    @classmethod
    def values_key(cls, config: Any) -> str | None:
        """Return the key for which a mixer of this config hands on values; None: it hands on none."""
        return None

    @classmethod
    def layer_tables(cls, config: Any, dims: Dims) -> list[tuple[Any, ...]]:
        """List what determines each table that a mixer of this config shares with the other layers, its kind first."""
        outer = getattr(config, "core", None)
        cores = [] if outer is None else [core for core, _ in CORES.of(outer).part.parts(outer, "")]
        sharing = [core for core in cores if CORES.of(core).part.shares_layer_tables(core)]
        return [(core.kind, config.heads, outer, core) for core in sharing]

    @classmethod
    def score_heads(cls, config: Any) -> int | None:
        """Number of heads whose scores a mixer of this config hands on to the next block; None: it hands on none."""
        return None

    @classmethod
    def reads_scores(cls, config: Any) -> bool:
        """Whether a mixer of this config reads the scores of the previous block, where there is one."""
        return False

    @property
    def head_counts(self) -> dict[str, int]:
        """Keys of the config with numbers of heads, of all ranks, that tensor parallelism must divide. For a mixer with
        the seam `first_head`."""
        return {"heads": self.heads}  # type: ignore[dict-item]

    def draws_by_head(self) -> "list[tuple[Module, Any, int]]":
        """List the modules that draw random numbers for heads, each with the part whose `first_head` says which are
        local, and with its heads of all ranks. For a mixer with the seam `first_head`."""
        return [(self, self, self.heads)]  # type: ignore[list-item]

    def multiply_adds(self, queries: int, keys: int) -> float:
        """Multiply-adds of a forward over one sequence, besides those of its weight matrices."""
        return 0.0


MIXERS = Family("mixer", MixerTraits, Mixer)
MixerSlot = Annotated[Mixer.Config, Slot(MIXERS)]
"""A config key that holds any mixer."""


@dataclass
class ValueEdge:
    """Values of the first layer on their way through the depth, one for all mixers of a block."""

    values: Tensor | None = None
    """[B, T, D / R] in compute dtype, of the local heads of R ranks; None: no mixer before has written any."""


def check_mixer(config: Config, dims: Dims, path: str) -> list[Problem]:
    """List the problems of a mixer in a model of `dims`: its own, and what the model asks that it cannot do."""
    entry = MIXERS.of(config)
    problems = list(entry.part.check(config, dims, path))
    needed = "cross" if dims.cross else "causal" if dims.causal else "bidirectional"
    if not getattr(entry.traits, needed):
        what = {
            "cross": "cannot do cross attention",
            "causal": "is not causal, and this model is",
            "bidirectional": "is not bidirectional, and this model is",
        }[needed]
        choices = kinds(MIXERS.able(**{needed: True}), path)
        problems.append(Problem(path, f"'{entry.name}' {what}", choices=choices))
    return problems


@MIXERS.register(
    "fourier",
    traits=BIDIRECTIONAL,
)
class Fourier(Mixer):
    """Lee-Thorp et al. 2021 (FNet): the real part of a Fourier transform over sequence and width, without
    parameters."""

    uses_position = False

    class Config(Mixer.Config):
        padding: Literal["hidden", "text"] = "hidden"
        """hidden: the transform of a sample is that of its text alone; text: padding is read as text, as the authors do
        in fine-tuning."""

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        self.reads_padding = config.padding == "text"

    @without_padding
    def forward(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        # Most devices have no Fourier transform in half precision.
        upcast = x if x.dtype == torch.float64 else x.float()
        # Unnormalised, as in the paper: the weight of mixing against the residual depends on it.
        mixed: Tensor = torch.fft.fft2(upcast, dim=(-2, -1)).real
        return mixed.to(x.dtype)


def hands_on_scores(config: Any) -> bool:
    """Whether blocks of a stack of this `StackConfig` hand on attention scores."""
    return any(MIXERS.of(mixer).part.score_heads(mixer) for mixer in config.mixers())


def without_scores(config: Any) -> tuple[Choice, ...]:
    """Return the choices of a stack of this `StackConfig` whose blocks hand on no attention scores."""
    handing_on = [mixer for mixer in config.mixers() if MIXERS.of(mixer).part.score_heads(mixer)]
    cores = dict.fromkeys(mixer.core.kind for mixer in handing_on if hasattr(mixer, "core"))
    return tuple(choice for kind in cores for choice in instead("core", kind, ["softmax"]))
