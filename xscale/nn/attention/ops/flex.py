"""Attention by torch's FlexAttention (Dong et al. 2024): fused on a GPU, a dense reference elsewhere.

The score of query i and key j is capped and then gets what `ScoreTerms` holds, as in `gathered_attention` and
`Softmax.attention_weights`; masked scores are -inf.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from xscale.core.errors import ConfigError, Problem
from xscale.core.requirements import take
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.ops.score_terms import ScoreTerms
from xscale.nn.dims import Dims
from xscale.nn.pattern.grid import Grid, TokenMask
from xscale.nn.pattern.pattern import MaskedLayout
from xscale.nn.position.position import POSITIONS
from xscale_kernels import torch_private
from xscale_kernels.attention_sinks import add_sinks

KERNEL_BLOCK = 128
"""Most queries or keys of a block of the fused kernels; blocks of the block mask must be multiples of it."""
LEAST_HEAD_WIDTH = 16
"""Fewest channels of a head in the fused kernels."""
GRAPHS = 64
"""Graphs of FlexAttention in a process: one for each structure of masks and terms, up to three while lengths change,
and as many without gradients. torch allows eight by default."""


@dataclass(frozen=True)
class KeyBlocks:
    """Blocks of keys that each block of queries reads, in FlexAttention's format."""

    counts: Tensor
    """[B or 1, H or 1, N], blocks that a row reads under the mask."""
    order: Tensor
    """[B or 1, H or 1, N, N], the columns of each row, those that it reads under the mask first."""
    unmasked: tuple[Tensor, Tensor] | None = None
    """Counts and order of the blocks that a row reads without the mask, which shows every key of theirs to every query.
    None: there are none."""
    layouts: tuple[tuple[Tensor, TokenMask | None], ...] = ()
    """Layouts [H or 1, n, n] in the pattern's own blocks with their token masks; a key is visible where one of them
    shows it. Empty: all keys are."""

    @classmethod
    def of(
        cls,
        seen: Tensor,
        unmasked: Tensor | None = None,
        layouts: tuple[tuple[Tensor, TokenMask | None], ...] = (),
    ) -> "KeyBlocks":
        """Build them of `seen` [B or 1, H or 1, N, N], true where some query of the row sees some key.

        `unmasked`, of the same shape: true where the mask hides no key of the column from any query of the row.
        """
        if unmasked is None:
            return cls(*_listed(seen), layouts=layouts)
        return cls(*_listed(seen & ~unmasked), unmasked=_listed(unmasked), layouts=layouts)

    @classmethod
    def of_mask(cls, mask: AttentionMask, device: torch.device) -> "KeyBlocks":
        """Build those of dense attention of T queries to T keys: causal order and packed documents hide blocks."""
        rows = -(-mask.keys // KERNEL_BLOCK)
        seen = torch.ones(1, 1, rows, rows, dtype=torch.bool, device=device)
        unmasked = _before(seen, mask.causal)
        if mask.causal:
            seen = seen.tril()
        if mask.query_documents is not None:
            documents = mask.query_documents.to(device)
            last = documents[:, -1:].expand(-1, rows * KERNEL_BLOCK - mask.keys)
            blocks = torch.cat((documents, last), 1).view(len(documents), rows, KERNEL_BLOCK)
            low, high = blocks.amin(-1), blocks.amax(-1)  # [B, N]
            meets = (low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None])
            seen = seen & meets[:, None]
            same = low == high
            unmasked = (
                unmasked
                & (same[:, :, None] & same[:, None] & (low[:, :, None] == low[:, None]))[:, None]
            )
        return cls.of(seen, unmasked)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and order of the blocks [..., N, N] of each row."""
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True).to(
        torch.int32
    )
    return blocks.sum(-1, dtype=torch.int32), order


def _before(blocks: Tensor, causal: bool) -> Tensor:
    """Those of the blocks [..., N, N] that neither causal order nor the end of the keys cuts."""
    if causal:
        return blocks.tril(-1)
    # The last column may hold padding.
    inside = torch.arange(blocks.shape[-1], device=blocks.device) < blocks.shape[-1] - 1
    return blocks & inside


class FlexAttention:
    """FlexAttention, compiled once, with a cache of the most recent layouts.

    `block` is the pattern's. The fused kernels need blocks of `KERNEL_BLOCK` tokens: smaller ones are read together,
    and hidden ones among them masked.
    """

    def __init__(self, block: int, soft_cap: float | None) -> None:
        self.block, self.soft_cap = block, soft_cap
        self.step = math.lcm(block, KERNEL_BLOCK)
        self._blocks: dict[tuple[Grid, torch.device, bool], KeyBlocks] = {}

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

    @staticmethod
    def why_not_terms(q: Tensor, mask: AttentionMask) -> str | None:
        """Return why FlexAttention does not take the position's terms of `mask` for queries like `q`; None: it does."""
        terms = mask.position_terms
        if terms is None or (not terms.adds_values and terms.tables(q) is not None):
            return None
        return "it takes terms of the scores by distance, and no others"

    @staticmethod
    def check_position(dims: Dims, path: str, *instead: str) -> list[Problem]:
        """List what the position of `dims` adds that FlexAttention, which the user names at `path`, does not take.

        `instead` has the implementations that do.
        """
        position = None if dims.cross else dims.position
        if position is None or POSITIONS.of(position).traits.where != "scores":
            return []
        part = POSITIONS.of(position).part
        if part.has_tables and not part.adds_values_of(position):
            return []
        what = f"flex takes terms of the scores by distance and no others, and position '{position.kind}' adds others"
        return [Problem(f"{path}.implementation", what, choices=take(*instead))]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        blocks: KeyBlocks,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend as many queries as keys: q [B, H, T, K], k and v [B, G, T, K] -> [B, H, T, K].

        `mask` may have a bias by pair, a bias by distance and a position's tables of distances without value rows;
        gradients go into all of them. A bias by distance costs N numbers of each head, N the distances that differ,
        and rows of queries or keys N of each token: see `ScoreTerms`. `sinks` [H] are logits in the denominators.
        """
        block = self.block
        length = mask.keys
        causal = mask.causal
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

        counts, order = blocks.unmasked or (None, None)
        block_mask = BlockMask.from_kv_blocks(
            blocks.counts, blocks.order, counts, order, BLOCK_SIZE=self.step, mask_mod=visible
        )
        grouped = q.shape[1] != k.shape[1]
        options = {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": grouped}
        if sinks is None:
            out: Tensor = self._function(q)(q, k, v, **options)
            return out[:, :, :length]
        out, extra = self._function(q)(q, k, v, **options, return_aux=AuxRequest(lse=True))
        out, _ = add_sinks(out, extra.lse, sinks)
        return out[:, :, :length]

    def _function(self, q: Tensor) -> Any:
        return (
            compiled_flex_attention()
            if q.is_cuda and not torch.compiler.is_compiling()
            else flex_attention
        )

    def pattern_blocks(
        self,
        masked_layouts: Callable[[], tuple[MaskedLayout, ...]],
        grid: Grid,
        device: torch.device,
        packed: bool = False,
    ) -> KeyBlocks:
        """Return the blocks of the pattern's layouts on that grid, which `masked_layouts` builds.

        `packed`: the mask hides other documents too, so that no block is read without it.
        """
        key = (grid, device, packed)
        if key not in self._blocks:
            if len(self._blocks) >= 4:
                del self._blocks[next(iter(self._blocks))]
            layouts = masked_layouts()
            union = np.logical_or.reduce([layout for layout, _ in layouts])
            if all(rule is None for _, rule in layouts):
                layouts = ((union, None),)
            seen = self._together(union).any(-1).any(2)
            unmasked = None
            if not packed:
                unruled = [layout for layout, rule in layouts if rule is None]
                shown = np.logical_or.reduce(unruled) if unruled else np.zeros_like(union)
                unmasked = _before(self._together(shown).all(-1).all(2), grid.causal)[None].to(
                    device
                )
            on_device = tuple(
                (torch.from_numpy(layout.copy()).to(device), rule) for layout, rule in layouts
            )
            self._blocks[key] = KeyBlocks.of(seen[None].to(device), unmasked, on_device)
        return self._blocks[key]

    def _together(self, layout: np.ndarray) -> Tensor:
        """A layout [H or 1, n, n] by the blocks that are read together: [H or 1, rows, blocks, rows, blocks]."""
        together = self.step // self.block
        beyond = -layout.shape[-1] % together
        padded = F.pad(torch.from_numpy(layout.copy()), (0, beyond, 0, beyond))
        rows = padded.shape[-1] // together
        return padded.view(len(padded), rows, together, rows, together)


@functools.cache
def compiled_flex_attention(backend: str = "inductor") -> Callable[..., Tensor]:
    """FlexAttention by torch.compile, the same function for all layers, so that equal ones share their graphs.

    Past `GRAPHS` it raises ConfigError. Without `fullgraph` torch would compute all scores from there on, and say so in
    its log only.
    """
    torch_private.allow_graphs(GRAPHS)
    compiled = torch.compile(flex_attention, fullgraph=True, backend=backend)
    too_many = torch_private.too_many_graphs()

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        try:
            out: Tensor = compiled(*args, **kwargs)
        except too_many:
            what = f"FlexAttention has {GRAPHS} graphs, of as many structures of masks, and needs another"
            fix = "Take gather (block_sparse) or dense (softmax), or fewer patterns and lengths in one process."
            raise ConfigError("core.implementation", what, fix) from None
        return out

    return attend
