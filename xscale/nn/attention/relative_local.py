"""Huang et al. 2019 (Music Transformer), section 3.5: relative local attention, in blocks that see the one before.

The sequence is split into blocks of N tokens. A token sees its own block up to itself, and the block before. The
score of query i and key j is q_i (k_j + e_ij) / sqrt(K), where e_ij is the row of the head's table for the distance i
- j, one of 0 to 2N - 1. The products of a block's queries and the table are skewed to queries and keys, as in section
3.4, so that memory is linear in the length.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveInt
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.chunks import split_chunks
from xscale.nn.attention.ops.dense import masked_softmax, repeat_kv, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.position.pairs import Pairs


@CORES.register(
    "relative_local",
    traits=CoreTraits(
        causal=True,
        bidirectional=False,
        cross=False,
        per_head=True,
        cost="ceil(T / block) * block * (6 * block + 1) * K",
        context=("ulysses",),
        dropout=True,
        documents=True,
        position_dependent=True,
        decode=True,
    ),
)
class RelativeLocal(Core):
    table: Parameter

    class Config(Core.Config):
        block: PositiveInt = 512
        """N, tokens of a block."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.block = config.block
        self.declare(
            "table", (heads, 2 * config.block, head_width), ("heads", "state", "state"), dims.init
        )

    @classmethod
    def example(cls) -> "RelativeLocal.Config":
        """Config for sequences of a few dozen tokens."""
        return cls.Config(block=8)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        assert mask.causal
        first, before = divmod(mask.offset, self.block)
        scaled = F.pad(upcast(q) * q.shape[-1] ** -0.5, (0, 0, before, 0))
        rows = split_chunks(scaled, 2, self.block)  # [B, H, M, N, K]
        keys, values = (
            self._two_blocks(repeat_kv(upcast(x), q.shape[1]), first) for x in (k, v)
        )  # [B, H, M, 2N, K]
        scores = rows @ keys.mT + self._relative(rows)  # [B, H, M, N, 2N]
        weights = self.drop_weights(
            masked_softmax(scores, self._hidden(mask, rows.shape[2], q.device)), mask
        )
        out = (weights @ values).flatten(2, 3)[:, :, before : before + mask.queries]
        return out.to(v.dtype)

    def _two_blocks(self, x: Tensor, first: int) -> Tensor:
        """Keys or values [B, H, S, K] of each block from the index `first` on and the one before, [B, H, M, 2N, K]."""
        x = x[:, :, (first - 1) * self.block :] if first else F.pad(x, (0, 0, self.block, 0))
        blocks = split_chunks(x, 2, self.block)  # [B, H, M + 1, N, K]
        return torch.cat((blocks[:, :, :-1], blocks[:, :, 1:]), 3)

    def _relative(self, rows: Tensor) -> Tensor:
        """Products of queries [B, H, M, N, K] with the rows of their distances to two blocks, [B, H, M, N, 2N]."""
        pairs = Pairs(self.block, 2 * self.block, offset=self.block, causal=True)
        places = pairs.distances(rows.device) + 2 * self.block - 1
        table = self.use(self.table).to(rows.dtype).index_select(1, places)  # [H, 2N + 1, K]
        return pairs.shift(rows @ table.mT[:, None])

    def _hidden(self, mask: AttentionMask, blocks: int, device: torch.device) -> Tensor:
        """Bool [B or 1, 1, M, N, 2N], true where a query does not see a key of two blocks."""
        size = self.block
        start = mask.offset // size * size
        starts = start + size * torch.arange(blocks, device=device)[:, None]  # [M, 1]
        queries = (starts + torch.arange(size, device=device))[:, :, None]  # [M, N, 1]
        keys = (starts + torch.arange(-size, size, device=device))[:, None]  # [M, 1, 2N]
        hidden = ((keys > queries) | (keys < 0))[None, None]
        documents = mask.key_documents
        if documents is None:
            return hidden
        # A key's document; padding, which causal order hides, has that of the last token.
        by_query, by_key = (
            documents[:, places.clamp(0, mask.keys - 1)] for places in (queries, keys)
        )
        return hidden | (by_query != by_key)[:, None]

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        blocks = -(-queries // self.block)
        return float(heads * blocks * self.block * (6 * self.block + 1) * head_width)
