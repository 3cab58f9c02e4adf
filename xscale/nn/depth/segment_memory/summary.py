"""Yoshida et al. 2020: recurrence added to a pre-trained model, one vector of the segment before.

    z = sum_l w_l (1 / T) sum_j h_j^(l),  w = softmax(alpha),  h_prev = FFN(z)

where h^(l) are the outputs of block l in the segment before, of T tokens. One block of the next segment attends to
h_prev beside its own tokens (section 3). The means are kept without a gradient, and mixed and mapped where they are
read, so that alpha and the FFN are trained by the segment that reads them.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from xscale.core.config import Config, NonNegativeInt, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import KeyNeed, at_most, take
from xscale.nn.depth.depth_pass import DepthPass, DepthState, StackUse
from xscale.nn.depth.segment_memory.memory import EMPTY, check_order, unreadable, with_memory
from xscale.nn.dims import Dims
from xscale.nn.init import ZEROS
from xscale.nn.linear import Linear
from xscale.nn.segment_state import (
    BEGINS,
    NEXT_DOCUMENT,
    SEGMENT_STATE,
    CarriedTensor,
    RowStates,
)
from xscale.nn.tokens import Tokens


class SegmentSummaryConfig(Config):
    layer: NonNegativeInt = 0
    """Block, numbered from 0, that attends to the vector."""
    hidden: PositiveInt | None = None
    """Hidden units of the FFN that maps the vector; null: 4 times the width."""


class SegmentSummary(DepthPass):
    """The vector of the segment before, for one block of a stack."""

    key = "segment_summary"
    reads_hidden_states = "their mean over the tokens is kept of each block"
    alpha: Parameter

    def __init__(self, config: SegmentSummaryConfig, dims: Dims) -> None:
        super().__init__()
        self.layer, self.depth, self.width = config.layer, dims.depth, dims.width
        hidden = config.hidden or 4 * dims.width
        # All blocks weigh the same at first.
        self.declare("alpha", (dims.depth,), ("state",), ZEROS, decays=False)
        self.up = Linear.from_width(dims, hidden, "state", bias=True)
        self.down = Linear(hidden, dims.width, ("width", "state"), dims.init, bias=True)

    @classmethod
    def build(
        cls, config: Any, dims: Dims, use: StackUse, blocks: Mapping[str, nn.Module]
    ) -> "SegmentSummary | None":
        if config.segment_summary is None:
            return None
        block: Any = blocks[str(config.segment_summary.layer)]
        block.reads_memory |= set(block.mixers())
        return cls(config.segment_summary, dims)

    @classmethod
    def check(cls, config: Any, dims: Dims, path: str, use: StackUse) -> list[Problem]:
        summary = config.segment_summary
        if summary is None:
            return []
        where = f"{path}.{cls.key}"
        if summary.layer >= config.depth:
            what = f"a stack of depth={config.depth} has blocks 0 to {config.depth - 1}"
            deeper = take(summary.layer + 1, key=f"{path}.depth")
            return [at_most(f"{where}.layer", what, config.depth - 1, *deeper)]
        problems = check_order(config, dims, where, use)
        if config.segment_memory is not None:
            what = "a block reads a memory of all tokens, or one vector of them"
            choices = take(None) + take(None, key=f"{path}.segment_memory")
            problems.append(Problem(where, what, choices=choices))
        for what, choices in unreadable(config.block_config(summary.layer), dims):
            problems.append(Problem(where, what, choices=choices + take(None)))
        return problems

    def needs(self) -> list[KeyNeed]:
        leave_out = ((".", None),)
        stages = "a stage has the means of its own blocks, and the vector is of all of them"
        shards = "a rank would have the mean of a shard of the segment"
        graph = "the state of the rows is another tensor after each step"
        return [
            KeyNeed("parallel.mesh.pp", (1,), stages, leave_out),
            KeyNeed("parallel.mesh.cp", (1,), shards, leave_out),
            KeyNeed("parallel.cuda_graphs", (False,), graph, leave_out),
        ]

    def reads_full_sequence(self) -> str | None:
        return self.key

    def carries(self) -> Mapping[str, CarriedTensor]:
        return {
            "documents": CarriedTensor((1,), torch.int64, EMPTY),
            "means": CarriedTensor((self.depth, self.width)),
        }

    def start(self, state: DepthState) -> None:
        rows, cache = state.tokens.get(SEGMENT_STATE), state.tokens.forward.cache
        if rows is None or (cache is not None and cache.setdefault(self.path, {})):
            return
        if cache is not None:
            cache[self.path]["begun"] = True
        kept = SummaryOfForward(self, rows, state.tokens)
        state.kept[self.key], state.tokens = kept, kept.tokens

    def before_block(self, state: DepthState) -> None:
        kept: SummaryOfForward | None = state.kept.get(self.key)
        if kept is not None and state.layer == self.layer and kept.source is not None:
            vector = self(kept.means).to(state.x.dtype)
            state.memory, state.source = torch.cat((vector, state.x), 1), kept.source

    def after_block(self, state: DepthState) -> None:
        kept: SummaryOfForward | None = state.kept.get(self.key)
        if kept is not None:
            kept.add(state.layer, state.x)
            if state.layer == self.layer:
                state.memory = state.source = None

    def forward(self, means: Tensor) -> Tensor:
        """Means of the blocks' outputs [B, L, D] -> the vector that a block attends to, [B, 1, D]."""
        weights = self.use(self.alpha).softmax(0)
        mixed = torch.einsum("l,bld->bd", weights.to(means.dtype), means)[:, None]
        vector: Tensor = self.down(F.gelu(self.up(mixed)))
        return vector


class SummaryOfForward:
    """The vector that one forward of a segment reads, and the means that it leaves."""

    def __init__(self, part: SegmentSummary, rows: RowStates, tokens: Tokens) -> None:
        self._part, self._rows = part, rows
        self.tokens, documents = tokens, rows.get(f"{part.path}.documents")
        begins, following = tokens.get(BEGINS), tokens.get(NEXT_DOCUMENT)
        if begins is not None:
            documents = documents.masked_fill(begins[:, None], EMPTY)
        self.means = rows.get(f"{part.path}.means")
        self.source: Tokens | None = None
        """Tokens of the vector and the segment; None: no segment is before, in generation."""
        is_filled = tokens.forward.cache is None or bool((documents > EMPTY).all())
        if is_filled:
            self.tokens, self.source = with_memory(tokens, documents)
        self._keeps = tokens.forward.cache is None
        # Only tokens of the document that continues in the next segment are of its past.
        is_past = torch.ones_like(tokens.ids, dtype=torch.bool)
        if following is not None and tokens.documents is not None:
            is_past = tokens.documents == following[:, None]
        self._weights = is_past / is_past.sum(1, keepdim=True).clamp(min=1)  # [B, T]
        if self._keeps:
            left = torch.where(is_past.any(1, keepdim=True), 0, EMPTY)
            rows.put(f"{part.path}.documents", left)
        self._means: list[Tensor] = []

    def add(self, layer: int, x: Tensor) -> None:
        """Add the output x [B, T, D] of a block; the last one completes the means."""
        if not self._keeps:
            return
        mean = torch.einsum("bt,btd->bd", self._weights.to(x.dtype), x.detach())
        self._means.append(mean)
        if layer == self._part.depth - 1:
            self._rows.put(f"{self._part.path}.means", torch.stack(self._means, 1))
