"""Base class and registry of attention cores: q, k, v -> o. Projections, heads and KV caches belong to the mixer."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from torch import Tensor, nn
from torch.nn import Parameter

from xscale.core.config import Slot
from xscale.core.errors import Problem
from xscale.core.registry import Family
from xscale.core.requirements import instead, take
from xscale.nn.attention.ops.dense import grouped_matmul, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.axes import Axis
from xscale.nn.dims import Dims
from xscale.nn.init import ZEROS
from xscale.nn.module import Module, Part
from xscale.nn.position.position import Position
from xscale.nn.post_step import PostStepState

ContextStyle = Literal["ring", "ulysses", "scan", "halo"]


@dataclass(frozen=True)
class CoreTraits:
    """Properties that a core declares; the conformance suite tests each."""

    causal: bool
    """Supports causal attention."""
    bidirectional: bool
    """Supports bidirectional attention."""
    cross: bool
    """Supports cross-attention: queries and keys from sequences of different lengths."""
    per_head: bool
    """Heads are computed independently, so tensor parallelism may shard them."""
    cost: str
    """Multiply-adds of one head's forward in T, S, K, the heads H and the config's keys; `w` is the keys a query sees.
    An expression of Python, with `min`, `max`, `ceil` and the natural `log`."""
    context: tuple[ContextStyle, ...] = ()
    """Supported styles of context parallelism."""
    bias: bool = False
    """Takes an additive bias on the scores."""
    position_terms: bool = False
    """Takes terms that a position computes from queries and keys, of the scores and of the output."""
    documents: bool = False
    """Keeps packed documents separate."""
    normalised: bool = True
    """The weights of the values that a query gets sum to 1, so that values of ones give ones."""
    position_dependent: bool = False
    """Which keys a query sees depends on its absolute position in the sample: a packed document sees no other document,
    but its output differs from that of the same document alone."""
    prefix: bool = False
    """In a causal model, lets all queries of a document see the keys of its prefix (`AttentionMask.key_prefix`)."""
    dropout: bool = False
    """Has attention weights and applies dropout to them in training."""
    exact: bool = False
    """Equals softmax attention over the allowed keys."""
    random: bool = False
    """Draws random numbers in evaluation too."""
    decode: bool = False
    """Incremental decoding over cached keys gives the same output as the full sequence."""
    static_decode: bool = False
    """Hides the keys behind `AttentionMask.last_keys`, so that a step of generation has static shapes."""
    previous_scores: bool = False
    """Reads the attention scores of the previous block, and hands on its own (`AttentionMask.score_edge`)."""
    running_stats: bool = False
    """Has parameters without a gradient, which `update_state` moves by statistics of the step's tokens."""


SCORES = CoreTraits(
    causal=True,
    bidirectional=True,
    cross=True,
    per_head=True,
    cost="2*T*S*K",
    context=("ulysses",),
    dropout=True,
    bias=True,
    position_terms=True,
    documents=True,
    prefix=True,
    decode=True,
)
"""Traits of a core that computes a score of each query and key, and normalises them over the keys, as softmax attention
does. Such cores declare `replace(SCORES, ...)`, by what is otherwise with them."""


class Core(Part, PostStepState):
    """Base class of attention cores, built as `Core(config, dims, heads, head_width)`."""

    head_period = 1
    """Heads that form a unit: parallelism gives each rank a multiple of it."""
    sinks: Parameter | None
    """[H], see `declare_sinks`."""
    set_by_mixer: ClassVar[tuple[str, Any, str] | None] = None
    """A key of the config, a value, and the kind of the only mixer that can hold the core with it, and sets it."""
    keeps_state: ClassVar[bool] = False
    """Whether it keeps more than keys and values during generation, in `AttentionMask.cache`: queries come in order."""
    uses_relative_bias = False
    """Whether the mixer passes a bias on relative positions as `AttentionMask.relative_bias`, without materialising it
    for every score."""

    def __init__(self, config: Any, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__()
        self.causal = dims.causal and not dims.cross
        self.first_head = 0
        """Index in the model of the first local head: set when heads are sharded over ranks, for cores whose heads
        differ by their index."""
        self.previous_score_heads = heads if dims.layer > 0 and self.reads_scores(config) else 0
        """Heads, over all ranks, whose scores of the previous block the output depends on; 0: on none."""
        self.layer_tables: Module | None = None
        """Parameters that the cores of all layers of a stack have in common; None: none."""
        self.register_parameter("sinks", None)

    @classmethod
    def check(cls, config: Any, dims: Dims, path: str) -> list[Problem]:
        """List the problems of the config; a core that overrides it begins with these."""
        problems = list(super().check(config, dims, path))
        if cls.set_by_mixer is not None:
            key, value, mixer = cls.set_by_mixer
            if getattr(config, key) == value:
                what = f"'{value}' is what the mixer {mixer} sets, with which alone the core can have it"
                default = type(config).model_fields[key].default
                choices = take(default) + take(mixer, key=f"{path.removesuffix('.core')}.kind")
                problems.append(Problem(f"{path}.{key}", what, choices=choices))
        return problems

    @property
    def counts_keys(self) -> bool:
        """Whether an output depends on the number of keys, also where order or documents hide some: padding counts."""
        return False

    def why_not_static(self) -> str | None:
        if self.traits.static_decode:
            return None
        return f"core '{self.Config.kind}' reads the number of keys so far"

    def hides_padding(self, documents: bool) -> bool:
        """Whether it hides the padding behind a sample from its text, by causal order or as a document of its own."""
        return (self.causal or documents) and not self.counts_keys

    @property
    def layout_block(self) -> int | None:
        """Tokens of a block of `block_layout`; None: it has no such layout."""
        return None

    @property
    def unsummable_state(self) -> str | None:
        """Why the states of a sequence's shards cannot be summed for the style scan; None: they can, or are carried on
        by a transition."""
        return None

    @property
    def transition_size(self) -> int:
        """Numbers of a head's state and of the matrix that takes it on, which shards of a sequence send for the style
        scan; 0: the state is a sum over the tokens, and they send it alone."""
        return 0

    @classmethod
    def shares_layer_tables(cls, config: Any) -> bool:
        """Whether a core of this config has `layer_tables`."""
        return False

    def prefers_relative_bias(
        self, position: Position, q: Tensor, k: Tensor, mask: AttentionMask
    ) -> bool:
        """Return whether the bias of the position on q [B, H, T, K] and k [B, G, S, K] is better given by distance,
        though the core also takes it by pair."""
        return False

    @classmethod
    def reads_scores(cls, config: Any) -> bool:
        """Whether a core of this config reads the scores of the previous block, where there is one."""
        return False

    @classmethod
    def shares_qk(cls, config: Any) -> bool:
        """Whether the paper projects queries and keys together: what the mixer's `shared_qk: null` stands for."""
        return False

    @classmethod
    def traits_of(cls, config: Any) -> CoreTraits:
        """Traits of the core with `config`: those that it declares, unless it is made of other cores."""
        return CORES.get(str(cls.Config.kind)).traits

    @property
    def traits(self) -> CoreTraits:
        """Traits of this core: `traits_of` its config."""
        return CORES.get(str(self.Config.kind)).traits

    @classmethod
    def parts(cls, config: Any, path: str) -> list[tuple[Any, str]]:
        """Configs with their dotted paths of the cores that compute: `config` itself, unless it is made of others."""
        return [(config, path)]

    @classmethod
    def check_heads(cls, config: Any, heads: int, path: str) -> list[Problem]:
        """List what `config` at `path` cannot do with that number of heads."""
        return []

    @classmethod
    def check_head_width(cls, config: Any, head_width: int, path: str) -> list[Problem]:
        """List what `config` at `path` cannot do with heads of that width."""
        return []

    def head_cores(self, heads: int) -> "list[tuple[Core, int]]":
        """The cores that compute, each with its number of heads, when this core has `heads`: itself, unless it is made
        of others."""
        return [(self, heads)]

    def tp_problems(self, tp: int, path: str) -> list[Problem]:
        if self.traits.per_head:
            return []
        kind = str(self.Config.kind)
        choices = take(1) + instead("core", kind, CORES.able(per_head=True))
        return [
            Problem(path, f"core '{kind}' mixes heads, so tp cannot shard them", choices=choices)
        ]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """Attend: q [B, H, T, K], k and v [B, G, S, K] with G dividing H -> [B, H, T, K]."""
        raise NotImplementedError

    def declare_sinks(self, heads: int) -> None:
        """Declare a logit for each head in the softmax's denominator, an attention sink, which starts at 0."""
        self.declare("sinks", (heads,), ("heads",), ZEROS, decays=False)

    def sink_logits(self) -> Tensor | None:
        """Return the logits of the sinks [H], in float32 at least; None: the core has none."""
        return None if self.sinks is None else upcast(self.use(self.sinks))

    def drop_weights(self, weights: Tensor, mask: AttentionMask) -> Tensor:
        """Apply the mask's dropout to attention weights [B, H, ...] in training."""
        dims: list[Axis] = ["batch", "heads"]
        dims += ["state"] * (weights.ndim - len(dims))
        return self.random.dropout(weights, mask.dropout if self.training else 0.0, tuple(dims))

    def mix_values(self, weights: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """Sum values [B, G, S, K], and what the position adds to them, with weights [B, H, T, S] after dropout:
        [B, H, T, K]."""
        weights, terms = self.drop_weights(weights, mask).to(v.dtype), mask.position_terms
        o = grouped_matmul(weights, v)
        return o + terms.values(weights) if terms is not None and terms.adds_values else o

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        """Return the multiply-adds of a forward over one sequence, all heads, as MFU counts them."""
        raise NotImplementedError

    def block_layout(self, length: int, heads: int) -> Any:
        """Return the computed blocks of scores over `length` tokens, bool [H or 1, blocks, blocks]; None: all."""
        return None


def share_layer_tables(blocks: Iterable[nn.Module], parts: type[Module] = Core) -> Module | None:
    """Return the one `layer_tables` of all parts of that class in the blocks of a stack; None if none has any.

    The caller owns it, so that its parameters have one name and belong to no block. The parts only refer to it.
    """
    owner: Module | None = None
    for part in [
        module for block in blocks for module in block.modules() if isinstance(module, parts)
    ]:
        tables = getattr(part, "layer_tables", None)
        if tables is not None:
            owner = owner or tables
            del part.layer_tables
            # Not by assignment, which would register the parameters with each part.
            vars(part)["layer_tables"] = owner
    return owner


CORES = Family("core", CoreTraits, Core)
CoreSlot = Annotated[Core.Config, Slot(CORES)]
"""A config key that holds any core."""
