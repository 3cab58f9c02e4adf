"""Base class and registry of position encodings, and `none`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from torch import Tensor, nn

from xscale.core.config import Slot
from xscale.core.errors import Problem
from xscale.core.registry import Family
from xscale.core.requirements import at_least, kinds, take
from xscale.nn.dims import Dims
from xscale.nn.module import Part
from xscale.nn.position.distance_tables import DistanceTables
from xscale.nn.position.pairs import Pairs, PositionPairs
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


@dataclass(frozen=True)
class PositionTraits:
    """Properties that a position part declares and the conformance suite checks."""

    where: Literal["none", "input", "qk", "bias", "scores"]
    """Where it acts: the embeddings, queries and keys, or the attention scores, by a bias that knows positions alone or
    by terms that read queries and keys."""
    relative: bool
    """Scores depend only on differences of positions."""
    extrapolates: bool
    """Defined at positions beyond those trained on."""
    cost: str
    """Multiply-adds of a whole sequence."""


class Position(Part):
    """Built as `Position(config, dims, heads, head_width)`; heads and head_width are 0 where it acts on the input."""

    seams = {"bias": Role.SCORE_BIAS, "embed": Role.POSITION_EMBEDDING}
    adds_bias = False
    """Whether `bias` returns a tensor: where = bias."""
    adds_scores = False
    """Whether `scores` returns a tensor: where = scores."""
    adds_values = False
    """Whether `values` returns a tensor, so that the core must have its attention weights."""
    projects = False
    """Whether `scores` reads the mixer's projections of queries and keys (`Pairs.project`)."""
    score_factor = 1.0
    """Factor of q k^T besides 1 / sqrt(K), unless the mixer has a `scale`."""
    linear_bias = False
    """Whether the bias is minus a fixed slope per head times the distance (ALiBi)."""
    learns_relative_bias = False
    """Whether the bias depends on the distance and on parameters."""
    has_tables = False
    """Whether `distance_tables` gives all of the terms of the scores and of the output."""
    shared = False
    """Whether all mixers of a stack have this part's parameters in common."""
    has_heads = True
    """Whether its parameters are of a number of heads, so that mixers with others cannot share them."""
    needs_even_width = False
    """Whether a model of odd width cannot have it."""

    @classmethod
    def adds_values_of(cls, config: Any) -> bool:
        """`adds_values` of the part with `config`."""
        return cls.adds_values

    @classmethod
    def check(cls, config: Any, dims: Dims, path: str) -> list[Problem]:
        if not cls.needs_even_width or dims.width % 2 == 0:
            return []
        choices = take(dims.width + 1, key="model.width")
        return [Problem(path, f"needs an even width, got width={dims.width}", choices=choices)]

    def embed(self, x: Tensor, tokens: Tokens) -> Tensor:
        """[B, T, D] -> [B, T, D]: where = input. It reads what the tokens have for each token alone, and the cache.

        A seam: sequence parallelism adds the encodings of its own tokens.
        """
        return x

    def rotate(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Queries or keys [B, H, T, K] -> the same shape: where = qk."""
        return x

    def rotate_both(self, q: Tensor, k: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Rotate queries [B, H, T, K] and keys [B, G, T, K] of the same tokens."""
        return self.rotate(q, tokens), self.rotate(k, tokens)

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Positions of queries [B, T] and keys [B, S] -> bias on the scores [B or 1, H, T, S]: where = bias.

        A seam: tensor parallelism takes the bias of its own heads.
        """
        return None

    def scores(self, q: Tensor, k: Tensor, pairs: Pairs) -> Tensor:
        """Queries [B, H, T, K] and keys [B, G, S, K] -> terms of the scores [B, H, T, S]: where = scores.

        Like q k^T they are divided by sqrt(K); the queries are already multiplied by `pairs.query_factor`.
        """
        raise NotImplementedError

    def values(self, weights: Tensor, pairs: Pairs) -> Tensor:
        """Attention weights [B, H, T, S] -> term of the output [B, H, T, K]: where = scores, `adds_values`."""
        raise NotImplementedError

    def terms_of_pairs(self, pairs: Pairs) -> "PositionTerms":
        """Return its terms of the scores and the output of these pairs, as a core takes them: where = scores."""
        return PositionTerms(self, pairs)

    def why_not_static(self) -> str | None:
        if not self.adds_scores:
            return None
        return f"position '{self.Config.kind}' has terms of the scores by the number of keys so far"

    @property
    def reach(self) -> int | None:
        """Tokens from which on all distances have one row in `distance_tables`; None: any two may differ."""
        return None

    def distance_tables(self, q: Tensor, distances: Tensor, pairs: Pairs) -> DistanceTables:
        """Distances key - query [N] -> their tables' rows, on the device of q [B, H, T, K]: `has_tables`."""
        raise NotImplementedError

    def relative_bias(self, offsets: Tensor) -> Tensor:
        """Offsets key - query [N] (negative = past) -> bias on the scores [H, N]: where = bias, relative."""
        bias = self.bias(offsets.new_zeros(1, 1), offsets[None])
        assert bias is not None
        return bias[0, :, 0]


@dataclass(frozen=True)
class PositionTerms:
    """Terms of a position that a core computes from its queries, keys and attention weights."""

    position: Position
    pairs: Pairs

    @property
    def adds_values(self) -> bool:
        """Whether there is a term of the output."""
        return self.position.adds_values

    def tables(self, q: Tensor) -> Callable[[Tensor], DistanceTables] | None:
        """Return the function from distances [N] to rows of the position's tables; None: it has other terms, or its
        distances are not differences of indices."""
        if not self.position.has_tables or isinstance(self.pairs, PositionPairs):
            return None
        return lambda distances: self.position.distance_tables(q, distances, self.pairs)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return what is added to the scores [B, H, T, S] of q [B, H, T, K] and k [B, G, S, K]."""
        return self.position.scores(q, k, self.pairs)

    def values(self, weights: Tensor) -> Tensor:
        """Return what is added to the output [B, H, T, K] of the attention weights [B, H, T, S]."""
        return self.position.values(weights, self.pairs)

    def select_heads(self, heads: Tensor) -> "PositionTerms":
        """Return the terms of some of the heads, given by their indices."""
        return replace(
            self,
            pairs=replace(
                self.pairs, heads=heads if self.pairs.heads is None else self.pairs.heads[heads]
            ),
        )


def share_position(blocks: Iterable[nn.Module]) -> Position | None:
    """Return the one position part of all mixers in the blocks of a stack; None if each mixer has its own.

    The caller owns it, so that its parameters have one name and belong to no block. The mixers only refer to it.
    """
    owner: Position | None = None
    for module in [module for block in blocks for module in block.modules()]:
        position = getattr(module, "position", None)
        if isinstance(position, Position) and position.shared:
            owner = owner or position
            del module.position
            # Not by assignment, which would register the part, and its parameters, with each mixer.
            vars(module)["position"] = owner
    return owner


def check_table_length(length: int | None, dims: Dims, path: str) -> list[Problem]:
    """List why the table of a position at `path` has too few rows, which its key `length` gives; None: enough."""
    if length is None or length >= dims.length:
        return []
    what = f"the table has {length} positions, and a sequence has {dims.length} tokens"
    return [at_least(f"{path}.length", what, dims.length, *take(None))]


POSITIONS = Family("position", PositionTraits, Position)
PositionSlot = Annotated[Position.Config, Slot(POSITIONS)]
"""A config key that holds any position."""


@POSITIONS.register(
    "none", traits=PositionTraits(where="none", relative=True, extrapolates=True, cost="0")
)
class NoPosition(Position):
    """No position encoding (Irie et al. 2019; Haviv et al. 2022): a causal mask alone breaks the symmetry of
    positions."""

    def __init__(
        self, config: Position.Config, dims: Dims, heads: int = 0, head_width: int = 0
    ) -> None:
        super().__init__()


def check_block_position(config: Any, dims: Dims, path: str) -> list[Problem]:
    """List why a position with this config, None for none, cannot be added to the input of a block."""
    if config is None:
        return []
    entry = POSITIONS.of(config)
    if entry.traits.where == "input":
        return list(entry.part.check(config, dims, path))
    what = f"'{entry.name}' acts within attention, and a block's position is added to its input"
    choices = kinds(POSITIONS.able(where="input"), path) + take(None)
    return [Problem(path, what, "Or take it as mixer.position.", choices=choices)]
