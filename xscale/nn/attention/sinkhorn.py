"""Tay et al. 2020 (sparse Sinkhorn attention): soft sorting of key blocks; a block sees itself and its sorted block.

R = F(mean of each block's keys), two layers with a relu; P = Sinkhorn(exp R), rows and columns normalised in turn;
block i sees its own keys and sum_j P_ij (block j's). Causal: a block is represented by the keys before it and gets
earlier blocks only, and columns are normalised over the rows so far. SortCut (`sortcut_blocks`): all queries see the
first sorted blocks.

The last block may be shorter than the others. A place that it lacks is mixed from the blocks that have it, with their
weights scaled to the sum over all blocks, and is hidden where none has it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import NonNegativeInt, PositiveFloat, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.chunks import pad_queries_to_keys, split_chunks
from xscale.nn.attention.ops.dense import repeat_kv, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims, check_trained_length
from xscale.nn.init import Init


@CORES.register(
    "sinkhorn",
    traits=CoreTraits(
        normalised=False,
        causal=True,
        bidirectional=True,
        cross=False,
        per_head=True,
        cost="4 * T * block * K + 2 * T * (T / block) * K + (T / block) * K * (K + T / block)",
        context=("ulysses",),
        decode=True,
    ),
    deviations=(
        "A block is represented by the mean of each head's keys; the paper: by the sum of the layer's input.",
    ),
)
class SinkhornCore(Core):
    first: Parameter
    second: Parameter

    class Config(Core.Config):
        renamed = {"cut": "sortcut_blocks"}

        block: PositiveInt = 64
        """Tokens of a block."""
        iterations: NonNegativeInt = 7
        """Sinkhorn iterations: each normalises rows and then columns."""
        temperature: PositiveFloat = 0.75
        """Temperature of the Gumbel-Sinkhorn scores; Gumbel noise is added in training."""
        sortcut_blocks: PositiveInt | None = None
        """SortCut: all queries see this many sorted blocks and no other keys; bidirectional models only. null: off."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config
        blocks = -(-dims.length // config.block)
        start = Init(std=head_width**-0.5)
        self.declare("first", (heads, head_width, head_width), ("heads", "state", "state"), start)
        self.declare("second", (heads, head_width, blocks), ("heads", "state", "tokens"), start)

    @classmethod
    def check(cls, config: Config, dims: Any, path: str) -> list[Problem]:
        if config.sortcut_blocks is None or not dims.causal:
            return []
        what = "SortCut would show a causal model later blocks"
        return [Problem(f"{path}.sortcut_blocks", what, choices=take(None))]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        size, length = self.config.block, k.shape[2]
        check_trained_length(self.path, length, self.second.shape[2] * size)
        q = pad_queries_to_keys(upcast(q), mask)
        k, values = repeat_kv(upcast(k), q.shape[1]), repeat_kv(upcast(v), q.shape[1])
        rows, keys, values = (split_chunks(x, 2, size) for x in (q, k, values))  # [B, H, N, b, K]
        places = self.places(keys, length)  # [B, H, N, N]
        filled = split_chunks(
            torch.ones(length, dtype=torch.bool, device=q.device), 0, size
        )  # [N, b]
        got_k, got_v = ((places @ x.flatten(3)).view_as(x) for x in (keys, values))
        if not self.causal and length % size:
            scale = _place_scale(places, filled)
            got_k, got_v = got_k * scale, got_v * scale
        if self.config.sortcut_blocks is not None:
            cut = min(self.config.sortcut_blocks, keys.shape[2])
            got_k, got_v = (x[:, :, :cut].flatten(2, 3) for x in (got_k, got_v))
            # All places of the first block are filled if any is, unless it is the only one.
            seen = filled[:1] if length < size else None
            out = self.random.attention(rows.flatten(2, 3), got_k, got_v, 0.0, attn_mask=seen)
        else:
            # Blocks become batches, whose heads have one mask.
            inputs = (rows, torch.cat((keys, got_k), 3), torch.cat((values, got_v), 3))
            rows, keys, values = (
                x.transpose(1, 2).flatten(0, 1) for x in inputs
            )  # [B * N, H, b or 2b, K]
            allowed = self._allowed(len(rows) // len(q), length, q.device)
            if allowed is not None:
                allowed = allowed.expand(len(q), *allowed.shape).flatten(0, 1)[
                    :, None
                ]  # [B * N, 1, b, 2b]
            out = self.random.attention(rows, keys, values, 0.0, attn_mask=allowed)
            out = out.view(len(q), -1, *out.shape[1:]).transpose(1, 2).flatten(2, 3)
        return out[:, :, mask.offset : length].to(v.dtype)

    def _allowed(self, blocks: int, length: int, device: torch.device) -> Tensor | None:
        """Bool [N, b, 2b], true where a token sees a key of its block or of the one it receives; None: all."""
        size = self.config.block
        if not self.causal and length == blocks * size:
            return None
        return ~self._hidden(blocks, length, device)

    def _hidden(self, blocks: int, length: int, device: torch.device) -> Tensor:
        size = self.config.block
        positions = torch.arange(blocks * size, device=device).view(blocks, size)
        hidden = (positions >= length)[:, None].expand(-1, size, -1)
        if not self.causal:
            # A received block has the places of the first one, which is full unless it is the only one.
            return torch.cat((hidden, hidden[:1].expand_as(hidden)), -1)
        hidden = hidden | (positions[:, None] > positions[:, :, None])
        # The first block has no earlier block to receive.
        return torch.cat(
            (hidden, (positions[:, :1] < size).expand(-1, size)[:, None].expand_as(hidden)), -1
        )

    def places(self, keys: Tensor, length: int) -> Tensor:
        """Soft permutation P: weight of block j at place i, from keys [B, H, N, b, K] -> [B, H, N, N]."""
        blocks, size = keys.shape[2:4]
        sums = keys.sum(3)
        if self.causal:
            sums = sums.cumsum(2) - sums
            means = sums / (torch.arange(blocks, device=keys.device) * size).clamp(min=1)[:, None]
        else:
            counts = (length - torch.arange(blocks, device=keys.device) * size).clamp(max=size)
            means = sums / counts[:, None]
        inner = F.relu(means @ self.use(self.first).to(means.dtype))
        scores = inner @ self.use(self.second).to(means.dtype)[..., :blocks]
        if self.training:
            scores = scores + self.random.gumbel(scores, ("batch", "heads", "state", "state"))
        return sinkhorn_normalize(
            scores / self.config.temperature, self.config.iterations, self.causal
        )

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        size, blocks = self.config.block, -(-keys // self.config.block)
        sort = (
            blocks * head_width * (head_width + self.second.shape[2])
            + 2 * blocks * blocks * size * head_width
        )
        seen = (
            2 * size
            if self.config.sortcut_blocks is None
            else min(self.config.sortcut_blocks, blocks) * size
        )
        return float(heads * (sort + 2 * blocks * size * seen * head_width))


def sinkhorn_normalize(scores: Tensor, iterations: int, causal: bool) -> Tensor:
    """Normalise scores [..., N, N] to a doubly stochastic matrix; causal: strictly below the diagonal."""
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu()
        scores = scores.masked_fill(hidden, -1e9)
    for _ in range(iterations):
        scores = scores - scores.logsumexp(-1, keepdim=True)
        scores = scores.masked_fill(hidden, -1e9) if causal else scores
        # A row of a causal matrix must not depend on the rows below it.
        scores = scores - (
            scores.logcumsumexp(-2) if causal else scores.logsumexp(-2, keepdim=True)
        )
        if causal:
            scores = scores.masked_fill(hidden, -1e9)
    return scores.exp()


def _place_scale(places: Tensor, filled: Tensor) -> Tensor:
    """Factor [B, H, N, b, 1] of what each place of a received block gets: the weight of all blocks over that of those
    that have the place, by P [B, H, N, N] and `filled` [N, b]; 0: none has it."""
    total = places.sum(-1, keepdim=True)  # [B, H, N, 1]
    have = places @ filled.to(places.dtype)  # [B, H, N, b]
    return torch.where(filled[0], total / have.clamp(min=torch.finfo(have.dtype).tiny), 0.0)[
        ..., None
    ]
