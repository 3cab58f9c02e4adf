"""Guo et al. 2022 (LongT5), transient global attention (TGlobal): local attention plus one global key for each block.

softmax over the keys at most `radius` away and the blocks' global tokens n(sum k), n(sum v), with n an RMS norm with
gain. The mixer `longt5` holds this core and norms the blocks' sums before it projects them, as the paper does.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import NonNegativeInt, PositiveInt
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.chunks import split_chunks, with_neighbour_chunks
from xscale.nn.attention.ops.dense import grouped_matmul, masked_softmax, repeat_kv, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.init import ONES


@CORES.register(
    "longt5",
    traits=CoreTraits(
        normalised=False,
        causal=False,
        bidirectional=True,
        cross=False,
        per_head=True,
        cost="2 * T * (3 * (radius + 1) + T // block) * K",
        context=("ulysses",),
        dropout=True,
    ),
    deviations=(
        "Outside the mixer longt5 a block's sum is normed after its projection, and there is no relative bias.",
        "Scores are scaled by 1 / sqrt(K), which T5 has in the initial weights of the queries instead.",
    ),
)
class LongT5(Core):
    set_by_mixer = ("norm", "input", "longt5")
    uses_relative_bias = True
    gains: Parameter

    class Config(Core.Config):
        radius: NonNegativeInt = 127
        """Local radius r: keys seen on each side."""
        block: PositiveInt = 16
        """k, tokens that are summed to one global token."""
        norm: Literal["projection", "input"] = "projection"
        """projection: the norm is that of a block's summed keys and of its summed values; input: the caller norms the
        block's summed hidden states before it projects them, as the mixer `longt5` does and sets here."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config
        if config.norm == "projection":
            self.declare("gains", (2, head_width), ("state", "state"), ONES, decays=False)

    @classmethod
    def example(cls) -> "LongT5.Config":
        """Config for sequences of a few hundred tokens."""
        return cls.Config(radius=15)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        assert self.config.norm == "projection", "the mixer longt5 calls `attend`"
        summaries = [self._sums(x, at) for at, x in enumerate((upcast(k), upcast(v)))]
        return self.attend(q, k, v, summaries, mask)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        summaries: Sequence[Tensor],
        mask: AttentionMask,
        block_bias: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Attend to the keys within the radius and to `summaries`, keys and values of the blocks [B, G, M, K] each.

        `mask.relative_bias` is added to the local scores. `block_bias` is that of the blocks: offsets, the key's block
        minus the query's [N], -> [H, N].
        """
        assert not mask.causal
        assert mask.queries == mask.keys
        size, length = self.config.radius + 1, mask.keys
        global_k, global_v = (upcast(x) for x in summaries)
        rows = split_chunks(upcast(q) * q.shape[-1] ** -0.5, 2, size)  # [B, H, N, C, K]
        local_k, local_v = (
            with_neighbour_chunks(split_chunks(repeat_kv(upcast(x), q.shape[1]), 2, size), 2, True)
            for x in (k, v)
        )
        local_scores = rows @ local_k.mT  # [B, H, N, C, 3C]
        global_scores = grouped_matmul(rows.flatten(2, 3), global_k.mT).view(
            *local_scores.shape[:4], -1
        )
        if mask.relative_bias is not None:
            local_scores = local_scores + _local_bias(mask.relative_bias, size, q.device).to(
                rows.dtype
            )
        if block_bias is not None:
            bias = self._global_bias(block_bias, length, rows.shape[2], q.device)
            global_scores = global_scores + bias.to(rows.dtype)
        hidden = F.pad(self._hidden(rows.shape[2], length, q.device), (0, global_scores.shape[-1]))
        weights = masked_softmax(torch.cat((local_scores, global_scores), -1), hidden)
        weights = self.drop_weights(weights, mask)
        out = (weights[..., : 3 * size] @ local_v).flatten(2, 3)
        out = out + grouped_matmul(weights[..., 3 * size :].flatten(2, 3), global_v)
        return out[:, :, :length].to(v.dtype)

    def block_sums(self, x: Tensor) -> Tensor:
        """Sum the tokens of each block: [..., T, K] -> [..., M, K], M = max(1, T // block)."""
        length = x.shape[-2]
        sums = x.new_zeros(*x.shape[:-2], _blocks(length, self.config.block), x.shape[-1])
        return sums.index_add(-2, self._block_of(length, length, x.device), x)

    def _block_of(self, tokens: int, length: int, device: torch.device) -> Tensor:
        # The tokens of an incomplete last block belong to the block before it, as in the paper's code.
        last = _blocks(length, self.config.block) - 1
        return (torch.arange(tokens, device=device) // self.config.block).clamp(max=last)

    def _sums(self, x: Tensor, which: int) -> Tensor:
        sums = self.block_sums(x)
        return F.rms_norm(sums, sums.shape[-1:], self.use(self.gains)[which].to(x.dtype), 1e-6)

    def _global_bias(
        self, block_bias: Callable[[Tensor], Tensor], length: int, chunks: int, device: torch.device
    ) -> Tensor:
        """Bias of each query's scores with each block: [H, N, C, M]."""
        blocks, size = _blocks(length, self.config.block), self.config.radius + 1
        by_offset = block_bias(torch.arange(1 - blocks, blocks, device=device))  # [H, 2M - 1]
        offset = (
            torch.arange(blocks, device=device)
            - self._block_of(chunks * size, length, device)[:, None]
        )
        return by_offset[:, offset + blocks - 1].view(-1, chunks, size, blocks)

    def _hidden(self, blocks: int, length: int, device: torch.device) -> Tensor:
        size = self.config.radius + 1
        query = torch.arange(blocks * size, device=device).view(blocks, size, 1)
        key = (torch.arange(blocks, device=device)[:, None, None] - 1) * size + torch.arange(
            3 * size, device=device
        )
        return (key < 0) | (key >= length) | ((key - query).abs() >= size)

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        size = self.config.radius + 1
        padded = -(-queries // size) * size
        return 2.0 * heads * padded * (3 * size + _blocks(keys, self.config.block)) * head_width


def _blocks(length: int, block: int) -> int:
    """Return the number of blocks in a sequence."""
    return max(1, length // block)


def _local_bias(
    relative_bias: Callable[[Tensor], Tensor], size: int, device: torch.device
) -> Tensor:
    """Bias of a chunk's scores with its keys and those of its neighbours: [H, 1, C, 3C]."""
    by_offset = relative_bias(torch.arange(1 - 2 * size, 2 * size, device=device))  # [H, 4C - 1]
    key, query = (
        torch.arange(-size, 2 * size, device=device),
        torch.arange(size, device=device)[:, None],
    )
    return by_offset[:, key - query + 2 * size - 1][:, None]
