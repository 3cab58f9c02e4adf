"""Child et al. 2019 and others: softmax attention over the key blocks that a pattern shows each query block.

With `sinks` each head has a logit in the denominator, as in the core `softmax`.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from xscale.core.config import PositiveFloat, PositiveInt
from xscale.core.errors import ConfigError, Problem
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.bias import RelativeBias
from xscale.nn.attention.ops.block_plan import BlockPlan, TokenMasks, plan_blocks
from xscale.nn.attention.ops.block_terms import NAMES, TermPlaces
from xscale.nn.attention.ops.dense import grouped_matmul, masked_softmax, upcast
from xscale.nn.attention.ops.flex import FlexAttention
from xscale.nn.attention.ops.gathered import ScoreOptions, gathered_attention
from xscale.nn.attention.ops.in_block_mask import (
    in_block_mask,
    pad_blocks,
    split_blocks,
)
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.ops.shown_keys import ShownKeys
from xscale.nn.dims import Dims
from xscale.nn.pattern.fixed import Fixed
from xscale.nn.pattern.grid import Grid
from xscale.nn.pattern.pattern import PATTERNS, Pattern, PatternSlot, check_pattern, pattern_layout
from xscale.nn.roles import Role
from xscale_kernels.block_sparse_attention import (
    IMPLEMENTATIONS,
    BlockLayout,
    block_sparse_attention,
    layout_from_mask,
)
from xscale_kernels.select import choose, log_choice


@CORES.register(
    "block_sparse",
    traits=CoreTraits(
        causal=True,
        bidirectional=True,
        cross=False,
        per_head=True,
        cost="2*T*w*K",
        context=("ulysses", "halo"),
        dropout=True,
        bias=True,
        position_terms=True,
        documents=True,
        position_dependent=True,
        decode=True,
        static_decode=True,
    ),
)
class BlockSparse(Core):
    uses_relative_bias = True
    seams = {"build_plan": Role.KERNEL_PLAN}

    class Config(Core.Config):
        pattern: PatternSlot = Fixed.Config()
        """Which key blocks each query block sees."""
        block: PositiveInt = 64
        """Tokens in a block, the unit of the pattern's sizes."""
        soft_cap: PositiveFloat | None = None
        """Scores become cap * tanh(score / cap) (Gemma team 2024); null: no cap."""
        sinks: bool = False
        """Whether each head has a learned logit in the softmax's denominator, an attention sink (gpt-oss), which starts
        at 0."""
        implementation: Literal["auto", "gather", "kernel", "flex"] = "auto"
        """gather: torch operators on gathered blocks, which take any bias and terms of a position; kernel: the fused
        operator, which takes ALiBi's slopes; flex: FlexAttention, which takes any bias, one by distance (ALiBi, T5's
        buckets) as a table, and a position's terms of the scores by distance, but has no gradients on a CPU; auto: on
        CUDA kernel, or flex where the pattern masks tokens inside blocks or the kernel does not take the bias, else
        gather. What kernel does not take goes to flex on CUDA, else to gather; other terms of a position are refused
        with flex. Decoding and dropout always use gather. Terms of the output that are not by distance need all scores,
        whatever is named."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config
        self.layer = dims.layer
        self.pattern: Pattern = PATTERNS.build(config.pattern)
        self._flex = FlexAttention(config.block, config.soft_cap)
        if config.sinks:
            self.declare_sinks(heads)
        self._layouts: dict[tuple[Grid, torch.device], BlockLayout | None] = {}
        self._shown: dict[int, ShownKeys] = {}
        """Keys by the capacity of a static cache, so that a step of generation computes no layout."""
        self._plans: dict[tuple[Grid, torch.device, bool], tuple[BlockPlan, TokenMasks]] = {}

    @classmethod
    def example(cls) -> Config:
        return cls.Config(block=16)

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = check_pattern(config.pattern, dims, f"{path}.pattern")
        if config.implementation == "flex":
            problems += FlexAttention.check_position(dims, path, "auto", "gather")
        return problems

    @property
    def counts_keys(self) -> bool:
        return not self.causal and self.pattern.counts_blocks

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        assert mask.causal or mask.queries == mask.keys, (
            "a pattern over two sequences of different lengths"
        )
        if mask.last_keys is not None:
            return self._all_scores(q, k, v, mask)
        dropout = mask.dropout if self.training else 0.0
        grid = self._grid(mask, q.shape[1], 0)
        implementation = self._implementation(q, mask, dropout, grid)
        if implementation == "all scores":
            return self._all_scores(q, k, v, mask)
        if implementation == "kernel":
            return self._fused(q, k, v, mask, grid)
        if implementation == "flex":
            layouts = partial(self.pattern.masked_layouts, grid)
            blocks = self._flex.pattern_blocks(
                layouts, grid, q.device, packed=mask.query_documents is not None
            )
            return self._flex.attend(q, k, v, mask, blocks, self.sink_logits())
        return self._gather(q, k, v, mask, dropout)

    @property
    def layout_block(self) -> int | None:
        return self.config.block

    def block_layout(self, length: int, heads: int) -> Any:
        config = self.config
        return pattern_layout(config.pattern, length, heads, self.causal, self.layer, config.block)

    def _implementation(self, q: Tensor, mask: AttentionMask, dropout: float, grid: Grid) -> str:
        """Return what computes a call: kernel, flex, gather or all scores. ConfigError where a named flex cannot."""
        wanted, terms = self.config.implementation, mask.position_terms
        if terms is not None and terms.adds_values and terms.tables(q) is None:
            by_torch, not_by_gather = (
                "all scores",
                "it takes terms of the output by distance, and no others",
            )
        elif dropout or mask.queries != mask.keys or (wanted == "auto" and not q.is_cuda):
            return "gather"
        else:
            by_torch, not_by_gather = "gather", ""
            if wanted == "gather":
                return wanted
        no_flex = self._why_not_flex(q, mask)
        if wanted == "flex":
            if no_flex is None:
                return wanted
            what = f"flex does not support this call: {no_flex}"
            raise ConfigError("core.implementation", what, "Take auto or gather.")
        refused: list[tuple[str, str]] = []
        if wanted != "gather":
            no_kernel = self._why_not_kernel(q, mask, grid)
            if no_kernel is None:
                return "kernel"
            # Without a fused kernel, FlexAttention computes all scores.
            if q.is_cuda and no_flex is None:
                return "flex"
            refused += [
                ("kernel", no_kernel),
                ("flex", no_flex or "it computes all scores on a CPU"),
            ]
        if not_by_gather:
            refused.append(("gather", not_by_gather))
        log_choice("attention of the core block_sparse", by_torch, refused)
        return by_torch

    def _why_not_flex(self, q: Tensor, mask: AttentionMask) -> str | None:
        """Return why FlexAttention does not support a call, or should not be chosen for it; None if it does."""
        terms = mask.position_terms
        reason = self._flex.why_not_terms(q, mask) or self._flex.why_unsupported(q)
        if self.config.implementation != "auto" or terms is None or reason is not None:
            return reason
        # FlexAttention's tables have a column for each distance, for each query or key.
        reach = terms.position.reach
        is_short = reach is not None and reach * (1 if mask.causal else 2) < mask.keys
        return (
            None
            if is_short
            else "its tables of all distances would grow with the square of the length"
        )

    def _why_not_kernel(self, q: Tensor, mask: AttentionMask, grid: Grid) -> str | None:
        """Return why the fused operator does not support a call; None if it does."""
        if mask.position_terms is not None:
            return "it takes no terms of a position"
        if mask.bias is not None or (mask.relative_bias is not None and not mask.linear_bias):
            return "it takes no bias besides ALiBi's slopes"
        layout = self._kernel_layout(grid, q.device)
        if layout is None:
            return "the pattern masks tokens inside blocks"
        choice = choose("block sparse", IMPLEMENTATIONS, None, q, q, layout)
        if choice.implementation.name != "reference":
            return None
        return "; ".join(f"{name}: {reason}" for name, reason in choice.refused)

    def _kernel_layout(self, grid: Grid, device: torch.device) -> BlockLayout | None:
        """Return the layout of the fused operator; None if token masks apply inside blocks."""
        key = (grid, device)
        if key not in self._layouts:
            if len(self._layouts) >= 4:
                del self._layouts[next(iter(self._layouts))]
            token_masks = self.pattern.masked_layouts(grid)
            self._layouts[key] = None
            if all(options is None for _, options in token_masks):
                block_mask = torch.from_numpy(
                    np.logical_or.reduce([layout for layout, _ in token_masks])
                )
                self._layouts[key] = layout_from_mask(block_mask.to(device), self.config.block)
        return self._layouts[key]

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, grid: Grid) -> Tensor:
        layout = self._kernel_layout(grid, q.device)
        assert layout is not None
        slopes = None
        if mask.relative_bias is not None:
            # ALiBi's slope is minus the bias at distance 1.
            slopes = -mask.relative_bias(torch.ones(1, dtype=torch.long, device=q.device))[:, 0]
        return block_sparse_attention(
            q,
            k,
            v,
            layout,
            causal=mask.causal,
            softcap=self.config.soft_cap,
            slopes=slopes,
            query_documents=mask.query_documents,
            key_documents=mask.key_documents,
            sinks=self.sink_logits(),
        )

    def _gather(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: float
    ) -> Tensor:
        block = self.config.block
        single = mask.queries == 1 and mask.causal
        # Query blocks are aligned with key blocks; a single query is a block of its own.
        first_row, before = divmod(mask.offset, block)
        size = 1 if single else block
        before = 0 if single else before
        grid = self._grid(mask, q.shape[1], first_row)
        queries = split_blocks(pad_blocks(q, 2, before, size), 2, size)  # [B, H, rows, Q, K]
        keys, values = (
            split_blocks(pad_blocks(x, 2, 0, block), 2, block) for x in (k, v)
        )  # [B, G, N, b, K]
        plan, token_masks = self._plan(grid, q.device, single)
        first_query = mask.offset - before
        block_mask = in_block_mask(q, mask, block, size, before)
        block_mask = replace(block_mask, token_masks=token_masks, first_query=first_query)
        bias = None
        if mask.relative_bias is not None:
            offsets = RelativeBias.offsets(
                first_query, queries.shape[2], size, keys.shape[2] * block
            )
            bias = mask.relative_bias(torch.arange(offsets.start, offsets.stop, device=q.device))
        elif (by_pair := self._bias_by_pair(q, k, mask)) is not None:
            bias = pad_blocks(pad_blocks(by_pair, 2, before, size), 3, 0, block)
            bias = split_blocks(split_blocks(bias, 3, block), 2, size)  # [B or 1, H, rows, Q, N, b]
        seed = int(self.random.integer(1 << 62)) if dropout else 0
        first_head = self.random.offset("heads")
        options = ScoreOptions(q.shape[-1] ** -0.5, self.config.soft_cap, dropout, seed, first_head)
        tables: list[Tensor | None] = []
        if (terms := mask.position_terms) is not None and (
            tables_of := terms.tables(q)
        ) is not None:
            seen = plan.distances(size, block)
            first, stop = seen.start - first_query, seen.stop - first_query
            if (reach := terms.position.reach) is not None:
                first, stop = min(max(first, -reach), reach), max(min(stop, reach + 1), 1 - reach)
            rows = vars(tables_of(torch.arange(first, stop, device=q.device)))
            tables = [None if rows[name] is None else upcast(rows[name]) for name in NAMES]
            options = replace(options, terms=TermPlaces(first, first_query, size, block))
        sinks = self.sink_logits()
        out: Tensor = gathered_attention(
            queries, keys, values, plan, block_mask, options, bias, tables, sinks
        )
        return out.flatten(2, 3)[:, :, before : before + mask.queries]  # [B, H, T, K]

    def _all_scores(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """Attend by operators that keep all scores, whose weights a position reads."""
        seen = self._shown_keys(q, mask)
        scores = upcast(grouped_matmul(q, k.mT)) * q.shape[-1] ** -0.5
        if self.config.soft_cap is not None:
            scores = self.config.soft_cap * torch.tanh(scores / self.config.soft_cap)
        bias = mask.score_bias(q, k)
        scores = scores if bias is None else scores + bias.to(scores.dtype)
        hidden = ~seen if mask.allowed is None else ~(seen & mask.allowed.to(q.device))
        return self.mix_values(masked_softmax(scores, hidden, self.sink_logits()), v, mask)

    def _shown_keys(self, q: Tensor, mask: AttentionMask) -> Tensor:
        """Return the keys that the pattern shows to each query, bool [B or 1, H or 1, T, S]."""
        if mask.last_keys is None:
            first_row = mask.offset // self.config.block
            grid = self._grid(mask, q.shape[1], first_row)
            queries = mask.offset + torch.arange(mask.queries, device=q.device)[None]
            return ShownKeys(self.pattern, grid, q.device).of_queries(queries, mask.keys)
        if mask.keys not in self._shown:
            every_query = replace(mask, queries=mask.keys, offset=0)
            grid = self._grid(every_query, q.shape[1], 0)
            self._shown[mask.keys] = ShownKeys(self.pattern, grid, q.device)
        return self._shown[mask.keys].of_queries(mask.last_keys, mask.keys)

    @staticmethod
    def _bias_by_pair(q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor | None:
        """Return what is added to the scores and has no table of distances, [B or 1, H, T, S]; None: nothing."""
        terms = mask.position_terms
        return mask.bias if terms is None or terms.tables(q) is not None else mask.score_bias(q, k)

    def _grid(self, mask: AttentionMask, heads: int, first_row: int) -> Grid:
        rows = -(-(mask.offset + mask.queries) // self.config.block) - first_row
        return Grid(
            blocks=-(-mask.keys // self.config.block),
            heads=heads,
            causal=mask.causal,
            block=self.config.block,
            layer=self.layer,
            first_row=first_row,
            first_head=self.first_head,
            row_count=rows,
        )

    def _plan(
        self, grid: Grid, device: torch.device, single: bool = False
    ) -> tuple[BlockPlan, TokenMasks]:
        """Return the block plan (cached for the most recent shapes) and the token masks to evaluate at each call.

        A `single` query has a new position in its block at each call, so it evaluates the token masks; whole blocks
        have them in the plan's tiles.
        """
        key = (grid, device, single)
        if key not in self._plans:
            if len(self._plans) >= 8:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = self.build_plan(grid, device, single)
        return self._plans[key]

    def build_plan(
        self, grid: Grid, device: torch.device, single: bool
    ) -> tuple[BlockPlan, TokenMasks]:
        """Return what `_plan` keeps. A seam: its tiles depend on data, also where a step is simulated without any."""
        masked_layouts = self.pattern.masked_layouts(grid)
        layout = np.logical_or.reduce([layout for layout, _ in masked_layouts])
        token_masks: TokenMasks = ()
        # Without any token mask, only the union of the layouts matters.
        if any(token_mask is not None for _, token_mask in masked_layouts):
            token_masks = tuple(
                (torch.from_numpy(layout.copy()), mask) for layout, mask in masked_layouts
            )
        if single:
            on_device = tuple((layout.to(device), token_mask) for layout, token_mask in token_masks)
            return plan_blocks(layout, device), on_device
        return plan_blocks(layout, device, token_masks, self.config.block, grid.first_row), ()

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        mask = AttentionMask(
            queries=queries,
            keys=keys,
            causal=self.causal,
            offset=keys - queries if self.causal else 0,
        )
        plan, _ = self._plan(
            self._grid(mask, heads, mask.offset // self.config.block), torch.device("cpu")
        )
        size = 1 if mask.causal and queries == 1 else self.config.block
        blocks = sum(
            bucket.columns.numel() * (heads if bucket.heads is None else 1)
            for bucket in plan.buckets
        )
        return 2.0 * blocks * size * self.config.block * head_width
