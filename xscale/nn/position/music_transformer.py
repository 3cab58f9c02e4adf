"""Huang et al. 2019 (Music Transformer), section 3.4: learned embeddings of every distance, which meet the queries.

The score of query i and key j is q_i (k_j + e_ij) / sqrt(K), where e_ij is the row of a table of the head for the
distance j - i. The products of queries and table are skewed to queries and keys.
"""

from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveInt
from xscale.core.errors import Problem
from xscale.nn.dims import Dims
from xscale.nn.position.distance_tables import DistanceTables
from xscale.nn.position.pairs import Pairs
from xscale.nn.position.position import POSITIONS, Position, PositionTraits, check_table_length


@POSITIONS.register(
    "music_transformer",
    traits=PositionTraits(where="scores", relative=True, extrapolates=False, cost="H*T*S*K"),
)
class MusicTransformer(Position):
    adds_scores = True
    has_tables = True
    table: Parameter

    class Config(Position.Config):
        length: PositiveInt | None = None
        """Distances from 0 on that have an embedding; null: the data's sequence length. Longer sequences fail."""

    def __init__(self, config: Config, dims: Dims, heads: int = 0, head_width: int = 0) -> None:
        super().__init__()
        self.length = config.length or dims.length
        # A causal model has no use for later keys.
        rows = self.length if dims.causal else 2 * self.length - 1
        self.declare("table", (heads, rows, head_width), ("heads", "state", "state"), dims.init)

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        return check_table_length(config.length, dims, path)

    def scores(self, q: Tensor, k: Tensor, pairs: Pairs) -> Tensor:
        embeddings = self._embeddings(pairs.distances(q.device), pairs)
        return pairs.shift(q * q.shape[-1] ** -0.5 @ embeddings.mT)  # [B, H, T, S]

    def distance_tables(self, q: Tensor, distances: Tensor, pairs: Pairs) -> DistanceTables:
        return DistanceTables(self._embeddings(distances, pairs))

    def _embeddings(self, distances: Tensor, pairs: Pairs) -> Tensor:
        """Embeddings of distances [R], [H, R, K]."""
        if pairs.keys > self.length:
            raise IndexError(
                f"{self.path} has embeddings of {self.length} distances, and there are {pairs.keys} keys"
            )
        table = pairs.select_heads(self.use(self.table))  # [H, rows, K]
        # Padding behind a sharded sequence has farther distances, which nothing reads.
        return table.index_select(1, (distances + self.length - 1).clamp(0, table.shape[1] - 1))
