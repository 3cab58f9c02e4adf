"""Shaw et al. 2018: learned embeddings of the distance, added to the keys and to the values.

The score of query i and key j is q_i (k_j + a^K_ij) / sqrt(K), and the output sum_j w_ij (v_j + a^V_ij), where a_ij is
the row of a table [2k + 1, K] for the distance j - i, clipped to [-k, k]. All heads of a layer have the same tables.
"""

import torch
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveInt
from xscale.nn.dims import Dims
from xscale.nn.position.distance_tables import DistanceTables
from xscale.nn.position.pairs import Pairs
from xscale.nn.position.position import POSITIONS, Position, PositionTraits


@POSITIONS.register(
    "shaw", traits=PositionTraits(where="scores", relative=True, extrapolates=True, cost="H*T*S*K")
)
class Shaw(Position):
    adds_scores = True
    has_tables = True
    key_table: Parameter
    value_table: Parameter

    class Config(Position.Config):
        distance: PositiveInt = 16
        """k: farther distances have the embedding of this one."""
        values: bool = True
        """Whether the values have embeddings of the distance too; without them the core keeps no attention weights."""

    def __init__(self, config: Config, dims: Dims, heads: int = 0, head_width: int = 0) -> None:
        super().__init__()
        self.distance = config.distance
        self.adds_values = config.values
        rows = 2 * config.distance + 1
        self.declare("key_table", (rows, head_width), ("state", "state"), dims.init)
        if config.values:
            self.declare("value_table", (rows, head_width), ("state", "state"), dims.init)

    @classmethod
    def adds_values_of(cls, config: Config) -> bool:
        return config.values

    def scores(self, q: Tensor, k: Tensor, pairs: Pairs) -> Tensor:
        embeddings = self._rows(self.key_table, pairs, q.device)
        return pairs.shift(q * q.shape[-1] ** -0.5 @ embeddings.mT)  # [B, H, T, S]

    def values(self, weights: Tensor, pairs: Pairs) -> Tensor:
        return pairs.unshift(weights) @ self._rows(
            self.value_table, pairs, weights.device
        )  # [B, H, T, K]

    @property
    def reach(self) -> int:
        return self.distance

    def distance_tables(self, q: Tensor, distances: Tensor, pairs: Pairs) -> DistanceTables:
        rows = distances.clamp(-self.distance, self.distance) + self.distance
        values = (
            self.use(self.value_table).index_select(0, rows)[None] if self.adds_values else None
        )
        return DistanceTables(
            self.use(self.key_table).index_select(0, rows)[None], value_rows=values
        )

    def _rows(self, table: Tensor, pairs: Pairs, device: torch.device) -> Tensor:
        """Embeddings of all distances of the pairs, [R, K]."""
        rows = pairs.distances(device).clamp(-self.distance, self.distance) + self.distance
        return self.use(table).index_select(0, rows)
