"""What context parallelism reads of a mixer with an attention, which has a seam of the role ATTENTION."""

from typing import Any, ClassVar, Protocol

from torch import Tensor

from xscale.nn.attention.core import Core
from xscale.nn.position.position import Position
from xscale.nn.tokens import Tokens


class ShardedAttention(Protocol):
    """A mixer whose core runs in one of the styles; widths and numbers of heads are those of all ranks."""

    core: Core
    position: Position | None
    causal: bool
    cross: bool
    """Whether the keys are of another sequence."""
    dropout: float
    """Dropout probability of the attention weights."""
    head_width: int
    shards_sequence: ClassVar[bool]
    """Whether the sequence may be sharded if the core can."""
    chooses_observed: bool
    """Whether each token observes others of its own choice, `Tokens.get(OBSERVED)`."""
    shared_qk: bool
    uses_relative_bias: bool
    """Whether the core takes a bias by distance."""
    reads_bias: ClassVar[bool]
    """Whether it reads the bias by pair."""
    q: Any
    """Projections and norms of queries and keys, which the terms of a position may read."""
    k: Any
    q_norm: Any
    k_norm: Any

    @property
    def heads(self) -> int:
        """H."""
        ...

    @property
    def query_channels(self) -> int:
        """H * K."""
        ...

    @property
    def key_channels(self) -> int:
        """G * K."""
        ...

    def keeps_documents_apart(self, tokens: Tokens, key_tokens: Tokens) -> bool:
        """Whether documents are masked from each other."""
        ...

    def pairs(self, queries: int, keys: int) -> Any:
        """Describe the pairs of queries and keys, for a position whose terms read them."""
        ...

    def make_mask(self, q: Tensor, k: Tensor, tokens: Tokens, key_tokens: Tokens) -> Any:
        """Return the mask of queries on keys: the seam of the role ATTENTION_MASK."""
        ...
