"""Attention by torch's FlexAttention (Dong et al. 2024): fused on a GPU, a dense reference elsewhere.

The score of query i and key j is capped and then gets what `ScoreTerms` holds, as in `gathered_attention` and
`Softmax.attention_weights`; masked scores are -inf.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.ops.score_terms import ScoreTerms
from xscale.nn.pattern.grid import Grid, TokenMask
from xscale.nn.pattern.pattern import MaskedLayout

KERNEL_BLOCK = 128
"""Most queries or keys of a block of the fused kernels; blocks of the block mask must be multiples of it."""
LEAST_HEAD_WIDTH = 16
"""Fewest channels of a head in the fused kernels."""


@dataclass(frozen=True)
class KeyBlocks:
    """Blocks of keys that each block of queries reads, in FlexAttention's format."""

    counts: Tensor
    """[B or 1, H or 1, N], blocks that a row reads."""
    order: Tensor
    """[B or 1, H or 1, N, N], the columns of each row, those that it reads first."""
    layouts: tuple[tuple[Tensor, TokenMask | None], ...] = ()
    """Layouts [H or 1, n, n] in the pattern's own blocks with their token masks; a key is visible where one of them
    shows it. Empty: all keys are."""

    @classmethod
    def of(cls, seen: Tensor, layouts: tuple[tuple[Tensor, TokenMask | None], ...] = ()) -> "KeyBlocks":
        """Build them of `seen` [B or 1, H or 1, N, N], true where some query of the row sees some key."""
        order = torch.argsort(seen.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
        return cls(seen.sum(-1, dtype=torch.int32), order, layouts)

    @classmethod
    def of_mask(cls, mask: AttentionMask, device: torch.device) -> "KeyBlocks":
        """Build those of dense attention of T queries to T keys: causal order and packed documents hide blocks."""
        rows = -(-mask.keys // KERNEL_BLOCK)
        seen = torch.ones(1, 1, rows, rows, dtype=torch.bool, device=device)
        if mask.causal:
            seen = seen.tril()
        if mask.query_documents is not None:
            documents = mask.query_documents.to(device)
            last = documents[:, -1:].expand(-1, rows * KERNEL_BLOCK - mask.keys)
            blocks = torch.cat((documents, last), 1).view(len(documents), rows, KERNEL_BLOCK)
            low, high = blocks.amin(-1), blocks.amax(-1)  # [B, N]
            meets = (low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None])
            seen = seen & meets[:, None]
        return cls.of(seen)


class FlexAttention:
    """FlexAttention, compiled once, with a cache of the most recent layouts.

    `block` is the pattern's. The fused kernels need blocks of `KERNEL_BLOCK` tokens: smaller ones are read together,
    and hidden ones among them masked.
    """

    def __init__(self, block: int, soft_cap: float | None) -> None:
        self.block, self.soft_cap = block, soft_cap
        self.step = math.lcm(block, KERNEL_BLOCK)
        self._compiled: Any = None
        self._blocks: dict[tuple[Grid, torch.device], KeyBlocks] = {}

    @staticmethod
    def why_unsupported(q: Tensor) -> str | None:
        """Return why FlexAttention does not support queries like `q`; None if it does."""
        if not q.is_cuda:
            return "FlexAttention has no gradients on a CPU" if q.requires_grad else None
        if q.dtype == torch.float64:
            return "FlexAttention takes no float64 on a GPU"
        if q.shape[-1] < LEAST_HEAD_WIDTH:
            return f"FlexAttention needs heads of {LEAST_HEAD_WIDTH} channels on a GPU, these have {q.shape[-1]}"
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, blocks: KeyBlocks) -> Tensor:
        """Attend as many queries as keys: q [B, H, T, K], k and v [B, G, T, K] -> [B, H, T, K].

        `mask` may have a bias by pair, a bias by distance and a position's tables of distances without value rows;
        gradients go into all of them. A bias by distance costs N numbers of each head, N the distances that differ,
        and rows of queries or keys N of each token: see `ScoreTerms`.
        """
        block, length, causal = self.block, mask.keys, mask.causal
        layouts, documents = blocks.layouts, mask.query_documents
        score_mod = ScoreTerms.of(q, k, mask, self.soft_cap).score_mod(length)
        padded = -length % self.step
        q, k, v = (F.pad(x, (0, 0, 0, padded)) if padded else x for x in (q, k, v))
        if documents is not None and padded:
            documents = F.pad(documents, (0, padded), value=-1)

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            allowed = j < length
            if layouts:
                shown = j < 0
                for layout, rule in layouts:
                    # Keys beyond the layout are padding.
                    last = layout.shape[-1] - 1
                    row, column = (i // block).clamp(max=last), (j // block).clamp(max=last)
                    in_layout = layout[h * 0 if layout.shape[0] == 1 else h, row, column]
                    shown = shown | (in_layout if rule is None else in_layout & rule(i, j))
                allowed = allowed & shown
            if causal:
                allowed = allowed & (j <= i)
            return allowed if documents is None else allowed & (documents[b, i] == documents[b, j])

        block_mask = BlockMask.from_kv_blocks(blocks.counts, blocks.order, BLOCK_SIZE=self.step, mask_mod=visible)
        grouped = q.shape[1] != k.shape[1]
        out: Tensor = self._function(q)(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=grouped)
        return out[:, :, :length]

    def _function(self, q: Tensor) -> Any:
        if not q.is_cuda:
            return flex_attention
        if self._compiled is None:
            self._compiled = torch.compile(flex_attention)
        return self._compiled

    def pattern_blocks(
        self, masked_layouts: Callable[[], tuple[MaskedLayout, ...]], grid: Grid, device: torch.device
    ) -> KeyBlocks:
        """Return the blocks of the pattern's layouts on that grid, which `masked_layouts` builds."""
        key = (grid, device)
        if key not in self._blocks:
            if len(self._blocks) >= 4:
                del self._blocks[next(iter(self._blocks))]
            layouts = masked_layouts()
            union = np.logical_or.reduce([layout for layout, _ in layouts])
            if all(rule is None for _, rule in layouts):
                layouts = ((union, None),)
            together = self.step // self.block
            beyond = -union.shape[-1] % together
            seen = F.pad(torch.from_numpy(union.copy()), (0, beyond, 0, beyond))
            rows = seen.shape[-1] // together
            seen = seen.view(len(seen), rows, together, rows, together).any(-1).any(2)
            shown = tuple((torch.from_numpy(layout.copy()).to(device), rule) for layout, rule in layouts)
            self._blocks[key] = KeyBlocks.of(seen[None].to(device), shown)
        return self._blocks[key]
