"""Hidden states of earlier segments that attention reads beside those of its own: Transformer-XL and its followers.

Dai et al. 2019 (Transformer-XL), section 3.2: in segment tau + 1, block l makes its queries of its input, and its keys
and values of the memory and that input,

    H~^(l-1) = [SG(M^(l-1)) o H^(l-1)],  q = H^(l-1) W_q,  k = H~^(l-1) W_k,  v = H~^(l-1) W_v,

where M are the last `length` inputs of block l in earlier segments, SG stops the gradient, and o joins along the
sequence. Ding et al. 2021 (ERNIE-Doc), equation 5: the memory of block l has outputs of block l, of the same layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from xscale.core.choices import Choice
from xscale.core.config import Config
from xscale.core.errors import Problem
from xscale.core.requirements import KeyNeed, instead, kinds, take
from xscale.nn.attention.core import CORES
from xscale.nn.depth.depth_pass import DepthPass, DepthState, StackUse
from xscale.nn.dims import Dims
from xscale.nn.position.position import POSITIONS
from xscale.nn.residual.residual_stream import RESIDUALS
from xscale.nn.segment_state import (
    BEGINS,
    NEXT_DOCUMENT,
    SEGMENT_STATE,
    CarriedTensor,
    RowStates,
)
from xscale.nn.tokens import SharedValues, Tokens

EMPTY = -(2**40)
"""Document of a slot of the memory that has no token: no text has it."""


class SegmentMemoryConfig(Config):
    length: int = Field(ge=1)
    """Tokens before the segment whose hidden states each block reads, in training."""
    eval_length: int | None = Field(default=None, ge=1)
    """The same in evaluation and generation; null: as in training."""
    layer: Literal["below", "same"] = "below"
    """Hidden states that a block reads: below: those that it read itself (Dai et al. 2019); same: its outputs, so that
    the context grows with the number of segments and not of blocks alone (Ding et al. 2021)."""


class SegmentMemory(DepthPass):
    """The memory of all blocks of a stack."""

    key = "segment_memory"
    reads_hidden_states = "the memory of earlier segments has one for each token"

    def __init__(self, config: SegmentMemoryConfig, dims: Dims) -> None:
        super().__init__()
        self.config = config
        self.width, self.length = dims.width, dims.length
        self.layers = tuple(str(layer) for layer in range(dims.depth))
        """Blocks whose memory is here."""

    @classmethod
    def build(
        cls, config: Any, dims: Dims, use: StackUse, blocks: Mapping[str, nn.Module]
    ) -> "SegmentMemory | None":
        if config.segment_memory is None:
            return None
        for block in blocks.values():
            part: Any = block
            part.reads_memory |= set(part.mixers())
        return cls(config.segment_memory, dims)

    @classmethod
    def check(cls, config: Any, dims: Dims, path: str, use: StackUse) -> list[Problem]:
        if config.segment_memory is None:
            return []
        return check(config, dims, f"{path}.{cls.key}", use)

    def needs(self) -> list[KeyNeed]:
        shards = "a rank would have a shard of the segment, and its queries read all of the memory"
        graph = "the memory of the rows is another tensor after each step"
        return [
            KeyNeed("parallel.mesh.cp", (1,), shards, ((".", None),)),
            KeyNeed("parallel.cuda_graphs", (False,), graph, ((".", None),)),
        ]

    def reads_full_sequence(self) -> str | None:
        return self.key

    def keep_blocks(self, layers: Sequence[str]) -> None:
        self.layers = tuple(layers)

    def slots(self, training: bool) -> int:
        """Return the tokens of the memory, in training or in evaluation."""
        evaluated = self.config.eval_length
        return self.config.length if training or evaluated is None else evaluated

    def carries(self) -> Mapping[str, CarriedTensor]:
        slots = max(self.slots(training=True), self.slots(training=False))
        states = {layer: CarriedTensor((slots, self.width)) for layer in self.layers}
        return {"documents": CarriedTensor((slots,), torch.int64, EMPTY), **states}

    def start(self, state: DepthState) -> None:
        rows, cache = state.tokens.get(SEGMENT_STATE), state.tokens.forward.cache
        # During generation keys and values of the memory are in the caches, once the segment has begun.
        if rows is None or (cache is not None and cache.setdefault(self.path, {})):
            return
        memory = MemoryOfForward.read(self, rows, state.tokens)
        if cache is not None:
            cache[self.path]["begun"] = True
        state.kept[self.key], state.tokens = memory, memory.tokens

    def before_block(self, state: DepthState) -> None:
        memory: MemoryOfForward | None = state.kept.get(self.key)
        if memory is None:
            return
        layer = str(state.layer)
        state.memory = torch.cat((memory.states(layer).to(state.x.dtype), state.x), 1)
        state.source = memory.source
        if self.config.layer == "below":
            memory.keep(layer, state.x)

    def after_block(self, state: DepthState) -> None:
        memory: MemoryOfForward | None = state.kept.get(self.key)
        if memory is None:
            return
        state.memory = state.source = None
        if self.config.layer == "same":
            memory.keep(str(state.layer), state.x)

    def token_fractions(self, fractions: list[tuple[float, float]]) -> list[tuple[float, float]]:
        memory = self.slots(training=True) / self.length
        return [(queries, keys + memory) for queries, keys in fractions]


class MemoryOfForward:
    """The memory that one forward of a segment reads, and what it leaves."""

    def __init__(
        self, part: SegmentMemory, rows: RowStates, tokens: Tokens, documents: Tensor, slots: int
    ) -> None:
        """`documents` [B, M] of the slots; `slots` of them are read."""
        self._part, self._rows = part, rows
        self._slots = slots
        self._keeps = tokens.forward.cache is None
        text_documents = (
            torch.zeros_like(tokens.ids) if tokens.documents is None else tokens.documents
        )
        kept = documents[:, documents.shape[1] - slots :]
        self.tokens = replace(tokens, documents=text_documents, shared_values=SharedValues())
        """The segment's tokens, whose documents tell those of the memory apart."""
        self.source = _with_memory(self.tokens, kept)
        """Tokens of the memory and the segment."""
        if self._keeps:
            ends = tokens.get(NEXT_DOCUMENT)
            following = text_documents[:, -1:] if ends is None else ends[:, None]
            joined = torch.cat((documents, text_documents), 1)[:, -documents.shape[1] :]
            is_text = joined > EMPTY
            rows.put(self._name("documents"), torch.where(is_text, joined - following, EMPTY))

    @staticmethod
    def read(part: SegmentMemory, rows: RowStates, tokens: Tokens) -> "MemoryOfForward":
        """Read the memory of the rows; that of a row whose segment begins anew is empty."""
        documents = rows.get(f"{part.path}.documents")  # [B, M]
        begins = tokens.get(BEGINS)
        if begins is not None:
            documents = documents.masked_fill(begins[:, None], EMPTY)
        slots = min(part.slots(part.training), documents.shape[1])
        if tokens.forward.cache is not None:
            # A step of generation sees all keys in the cache, so that no empty slot may be there.
            slots = min(slots, int((documents > EMPTY).sum(1).min()))
        return MemoryOfForward(part, rows, tokens, documents, slots)

    def states(self, layer: str) -> Tensor:
        """Return the hidden states [B, M, D] that a block reads of the segments before."""
        kept = self._rows.get(self._name(layer))
        return kept[:, kept.shape[1] - self._slots :]

    def keep(self, layer: str, x: Tensor) -> None:
        """Keep the hidden states x [B, T, D] of the segment for a block, behind those that are kept."""
        if self._keeps:
            name = self._name(layer)
            kept = self._rows.get(name)
            joined = torch.cat((kept, x.detach().to(kept.dtype)), 1)
            self._rows.put(name, joined[:, -kept.shape[1] :])

    def _name(self, name: str) -> str:
        return f"{self._part.path}.{name}"


def _with_memory(tokens: Tokens, documents: Tensor) -> Tokens:
    """Return the tokens behind a memory of `documents` [B, M], whose positions are before theirs."""
    slots = documents.shape[1]
    places = torch.arange(-slots, 0, device=documents.device).expand(len(documents), -1)
    assert tokens.documents is not None
    return Tokens(
        ids=torch.cat((torch.zeros_like(places), tokens.ids), 1),
        positions=torch.cat((places, tokens.positions), 1),
        documents=torch.cat((documents, tokens.documents), 1),
        memory_tokens=slots,
        forward=tokens.forward,
    )


def check(stack: Any, dims: Dims, path: str, use: StackUse) -> list[Problem]:
    """List why the blocks of `stack` cannot read a memory of earlier segments; `path` is that of the memory."""
    where = path.rpartition(".")[0]
    reasons: list[tuple[bool, str, tuple[Choice, ...]]] = [
        (not dims.causal, "segments follow each other in the order of a causal model", ()),
        (use.cross, "the blocks read an encoder's output as keys and values", ()),
        (
            stack.halting is not None,
            "tokens that halt leave no hidden state for each block",
            take(None, key=f"{where}.halting"),
        ),
        (
            stack.block.position is not None,
            "block.position is added to a block's input, and the memory is not of it",
            take(None, key=f"{where}.block.position"),
        ),
    ]
    problems = {
        what: Problem(path, what, choices=take(None) + choices)
        for is_so, what, choices in reasons
        if is_so
    }
    for layer in range(stack.depth):
        for what, choices in _unreadable(stack.block_config(layer), dims):
            problems.setdefault(what, Problem(path, what, choices=choices + take(None)))
    return list(problems.values())


def reads_memory(core: Any) -> bool:
    """Return whether a core of this config scores each query and key, and may have fewer queries than keys."""
    part = CORES.of(core).part
    traits = part.traits_of(core)
    by_score = traits.causal and traits.cross and traits.documents and traits.position_terms
    return bool(by_score and traits.decode and not part.keeps_state)


def position_reads_memory(kind: str) -> bool:
    """Return whether a position encoding tells the distance to tokens before the segment."""
    traits = POSITIONS.get(kind).traits
    in_scores = traits.where in ("none", "qk", "scores")
    return bool(traits.relative and traits.extrapolates and in_scores)


def _unreadable(block: Any, dims: Dims) -> Iterator[tuple[str, tuple[Choice, ...]]]:
    """Yield why mixers of a block cannot read a memory, each with the changes that may end it."""
    able = [entry.name for entry in CORES if reads_memory(entry.part.Config())]
    positions = [entry.name for entry in POSITIONS if position_reads_memory(entry.name)]
    for mixer in block.mixers():
        if mixer.kind != "attention" or mixer.shared_qk:
            what = f"mixer '{mixer.kind}' makes keys and values of its queries' tokens alone"
            yield what, instead("mixer", str(mixer.kind), ["attention"])
            continue
        if not reads_memory(mixer.core):
            what = f"core '{mixer.core.kind}' has as many queries as keys"
            yield what, instead("core", str(mixer.core.kind), able)
        position = mixer.position or dims.position
        if position is not None and not position_reads_memory(str(position.kind)):
            what = f"position '{position.kind}' tells no distance to tokens of earlier segments"
            yield (
                what,
                instead("position", str(position.kind), positions)
                + kinds(positions, "model.position"),
            )
    stream = RESIDUALS.of(block.residual)
    if stream.part.joins_sublayers:
        what = f"residual '{stream.name}' reads one norm of keys and of the feed-forward part"
        usual = [stream.part.instead(block.residual)]
        yield what, instead("residual", stream.name, usual)
