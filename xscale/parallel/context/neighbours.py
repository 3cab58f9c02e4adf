"""Exchange of neighbours for convolutions and other local mixers: a rank fetches what the ends of its shard read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xscale.mesh.differentiable_collectives import all_to_all
from xscale.nn.tokens import Tokens
from xscale.parallel.context.sequence_sharding import SequenceSharding, TokenShard


def needed_positions(
    rank: int, owner: int, size: int, length: int, left: int, right: int
) -> list[int]:
    """Return the positions, of the owner's `size`, that another rank's tokens read, counted from the owner's first."""
    first, end = rank * size, min((rank + 1) * size, length)
    if first >= end or rank == owner:
        return []
    around = (*range(max(0, first - left), first), *range(end, min(end + right, length)))
    return [position - owner * size for position in around if position // size == owner]


def traffic(reader: Any, cp: int, tp: int, length: int) -> float:
    """Estimate the mean elements a rank sends in the forward of one sequence."""
    size = 2 * -(-length // (2 * cp))
    pairs = [(rank, owner) for rank in range(cp) for owner in range(cp)]
    sent = sum(
        len(needed_positions(*pair, size, length, reader.left, reader.right)) for pair in pairs
    )
    return float(reader.exchanged_width / (tp if reader.sharded_over_tp else 1) * sent / cp)


@dataclass(frozen=True)
class NeighbourExchange:
    """Substitute for a `with_neighbours` over a sequence sharded over cp in adjacent chunks."""

    reader: Any
    """Says how many neighbours it reads, `left` and `right`."""
    inner: Callable[[Tensor, Tokens], tuple[Tensor, Tensor | None]]
    """Finds the neighbours in a sequence that is not sharded."""

    def __call__(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor | None]:
        """[B, P, C] -> [B, left + P + right, C] and the documents [B, left + P + right]."""
        if not isinstance(tokens, TokenShard):
            return self.inner(x, tokens)
        left, right, size = self.reader.left, self.reader.right, x.shape[1]
        first = tokens.sharding.rank * size
        around = torch.arange(first - left, first + size + right, device=x.device)
        inside = (around >= 0) & (around < tokens.length)
        near = self._fetch(x, tokens.length, tokens.sharding).masked_fill(~inside[:, None], 0.0)
        documents = tokens.full.documents
        if documents is not None:
            documents = documents.index_select(1, around.clamp(0, tokens.length - 1)).masked_fill(
                ~inside, -1
            )
        return near, documents

    def _fetch(self, x: Tensor, length: int, sharding: SequenceSharding) -> Tensor:
        assert not sharding.balanced, "neighbours are on adjacent ranks"
        left, right, rank, size = self.reader.left, self.reader.right, sharding.rank, x.shape[1]
        ranks = range(sharding.count)
        sent = [needed_positions(other, rank, size, length, left, right) for other in ranks]
        received = [needed_positions(rank, owner, size, length, left, right) for owner in ranks]
        by_position = x.transpose(0, 1)  # [P, B, C]
        rows = by_position.index_select(
            0, _index([position for positions in sent for position in positions], x)
        )
        rows = all_to_all(
            rows, [len(part) for part in sent], [len(part) for part in received], sharding.group
        )
        # A place in the result: the left neighbours, the shard, the right neighbours.
        places = [
            left + (owner - rank) * size + position
            for owner in ranks
            for position in received[owner]
        ]
        near = rows.new_zeros(left + size + right, *rows.shape[1:]).index_copy(
            0, _index(places, x), rows
        )
        near = near.index_copy(0, torch.arange(left, left + size, device=x.device), by_position)
        return near.transpose(0, 1)


def _index(positions: list[int], like: Tensor) -> Tensor:
    return torch.tensor(positions, dtype=torch.long, device=like.device)
