"""He et al. 2021 (DeBERTa), section 3.1: disentangled attention, which scores contents and relative positions apart.

The score of query i and key j is (q_i k_j + q_i K(p_ij) + k_j Q(p_ij)) / sqrt(3K): content to content, content to
position, position to content. p_ij is the row of a table [2k, D] for the distance i - j, and Q and K project to queries
and keys. DeBERTa v2 has k buckets of distances on either side: half of them hold one distance, the others ranges that
grow exponentially up to `distance`. All layers have the same table: `shared`.
"""

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import Parameter

from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.dims import Dims
from xscale.nn.norm.norm import NORMS, Norm, NormSlot
from xscale.nn.position.distance_tables import DistanceTables
from xscale.nn.position.pairs import Pairs
from xscale.nn.position.position import POSITIONS, Position, PositionTraits


@POSITIONS.register(
    "deberta",
    traits=PositionTraits(where="scores", relative=True, extrapolates=True, cost="2*H*T*S*K"),
    deviations=(
        "The mixer's projections of queries and keys also project the table, as in DeBERTa v2; the paper has two more.",
        "The third term reads the row of i - j, as the authors' code does; the paper writes that of j - i.",
        "There is no dropout of the table.",
    ),
)
class Deberta(Position):
    adds_scores = True
    has_tables = True
    projects = True
    has_heads = False
    score_factor = 3**-0.5
    table: Parameter

    class Config(Position.Config):
        buckets: int | None = Field(default=256, ge=4)
        """k: buckets of distances on either side, as in DeBERTa v2; null: a row for each distance below `distance`."""
        distance: int = Field(default=512, ge=2)
        """Distances that are told apart: all farther ones are the last."""
        norm: NormSlot | None = None
        """Norm of each row of the table, as in the released DeBERTa v2; null: none."""
        shared: bool = False
        """Whether all blocks of a stack have one table, as in DeBERTa; false: each block has its own."""

    def __init__(self, config: Config, dims: Dims, heads: int = 0, head_width: int = 0) -> None:
        super().__init__()
        self.shared = config.shared
        self.buckets, self.distance = config.buckets, config.distance
        self.rows = config.buckets or config.distance
        self.declare("table", (2 * self.rows, dims.width), ("state", "width"), dims.init)
        self.norm: Norm | None = (
            None if config.norm is None else NORMS.build(config.norm, dims.width)
        )

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        if config.buckets is not None and config.distance <= config.buckets // 2 + 1:
            what = f"must be > {config.buckets // 2 + 1}, got {config.distance}: near distances have their own buckets"
            return [
                Problem(
                    f"{path}.distance",
                    what,
                    "Or more.",
                    choices=take(config.buckets + 1) + take(None, key=f"{path}.buckets"),
                )
            ]
        return []

    def scores(self, q: Tensor, k: Tensor, pairs: Pairs) -> Tensor:
        queries, keys = self._projected(pairs)
        scale = q.shape[-1] ** -0.5
        rows = self.row(-pairs.distances(q.device))
        to_position = pairs.shift(q * scale @ keys.index_select(1, rows).mT)  # [B, H, T, S]
        turned = Pairs(pairs.keys, pairs.queries, -pairs.offset)
        rows = self.row(turned.distances(q.device))
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        to_content = turned.shift(
            k * (scale * pairs.query_factor) @ queries.index_select(1, rows).mT
        )  # [B, H, S, T]
        return to_position + to_content.mT

    @property
    def reach(self) -> int:
        return self.distance

    def distance_tables(self, q: Tensor, distances: Tensor, pairs: Pairs) -> DistanceTables:
        queries, keys = self._projected(pairs)
        rows = self.row(-distances)
        return DistanceTables(
            keys.index_select(1, rows), queries.index_select(1, rows) * pairs.query_factor
        )

    def _projected(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Project the table as queries and as keys, each [H, 2k, K]."""
        assert pairs.project is not None
        table = self.use(self.table)
        queries, keys = pairs.project(
            table if self.norm is None else self.norm(table)
        )  # [H, 2k, K], [G, 2k, K]
        keys = keys.repeat_interleave(len(queries) // len(keys), 0)
        return pairs.select_heads(queries), pairs.select_heads(keys)

    def row(self, distances: Tensor) -> Tensor:
        """Return the rows of the table for distances query - key, of the same shape."""
        if self.buckets is not None:
            half = self.buckets // 2
            far = distances.abs().clamp(min=half)
            # Both logarithms in single precision: the farthest distance must give exactly 1.
            last = torch.tensor(
                (self.distance - 1) / half, device=distances.device, dtype=torch.float32
            )
            growth = torch.log(far.float() / half) / torch.log(last)
            ranges = (torch.ceil(growth * (half - 1)) + half).long() * distances.sign()
            distances = torch.where(distances.abs() <= half, distances, ranges)
        return (distances + self.rows).clamp(0, 2 * self.rows - 1)
