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
from torch import Tensor, nn

from xscale.core.choices import Choice
from xscale.core.config import Config, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import KeyNeed, instead, kinds, take
from xscale.nn.attention.core import CORES
from xscale.nn.auxiliary import attach
from xscale.nn.depth.depth_pass import DepthPass, DepthState, StackUse
from xscale.nn.depth.segment_memory.compression import (
    CompressionConfig,
    check_compression,
    compressions,
)
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
    length: PositiveInt
    """Tokens before the segment whose hidden states each block reads, in training."""
    eval_length: PositiveInt | None = None
    """The same in evaluation and generation; null: as in training."""
    layer: Literal["below", "same"] = "below"
    """Hidden states that a block reads: below: those that it read itself (Dai et al. 2019); same: its outputs, so that
    the context grows with the number of segments and not of blocks alone (Ding et al. 2021)."""
    compression: CompressionConfig | None = None
    """Compressed memory of tokens that leave the memory (Rae et al. 2020); null: they are dropped."""


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
        self.compress = compressions(config.compression, dims)
        """Compression of the memory of each block; empty: tokens that leave it are dropped."""

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
        for layer in [layer for layer in self.compress if layer not in layers]:
            del self.compress[layer]

    @property
    def compressed_slots(self) -> int:
        """Slots of the compressed memory; 0: there is none."""
        return 0 if self.config.compression is None else self.config.compression.slots

    def slots(self, training: bool) -> int:
        """Return the tokens of the memory, in training or in evaluation."""
        evaluated = self.config.eval_length
        return self.config.length if training or evaluated is None else evaluated

    def carries(self) -> Mapping[str, CarriedTensor]:
        slots = max(self.slots(training=True), self.slots(training=False))
        carried = {"documents": CarriedTensor((slots,), torch.int64, EMPTY)}
        carried |= {layer: CarriedTensor((slots, self.width)) for layer in self.layers}
        if count := self.compressed_slots:
            carried["compressed.documents"] = CarriedTensor((count,), torch.int64, EMPTY)
            carried |= {
                f"compressed.{layer}": CarriedTensor((count, self.width)) for layer in self.layers
            }
        return carried

    def start(self, state: DepthState) -> None:
        rows, cache = state.tokens.get(SEGMENT_STATE), state.tokens.forward.cache
        # During generation keys and values of the memory are in the caches, once the segment has begun.
        if rows is None or (cache is not None and cache.setdefault(self.path, {})):
            return
        memory = MemoryOfForward(self, rows, state.tokens)
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
            state.x = memory.keep(layer, state.x)

    def after_block(self, state: DepthState) -> None:
        memory: MemoryOfForward | None = state.kept.get(self.key)
        if memory is None:
            return
        state.memory = state.source = None
        if self.config.layer == "same":
            state.x = memory.keep(str(state.layer), state.x)

    def token_fractions(self, fractions: list[tuple[float, float]]) -> list[tuple[float, float]]:
        memory = (self.slots(training=True) + self.compressed_slots) / self.length
        return [(queries, keys + memory) for queries, keys in fractions]


class MemoryOfForward:
    """The memory that one forward of a segment reads, and what it leaves."""

    def __init__(self, part: SegmentMemory, rows: RowStates, tokens: Tokens) -> None:
        """Read which slots of the memory of the rows are filled: none of a row whose segment begins anew."""
        self._part, self._rows = part, rows
        self._forward = tokens.forward
        self._keeps = tokens.forward.cache is None
        ids = tokens.ids
        self._documents = torch.zeros_like(ids) if tokens.documents is None else tokens.documents
        self._begins = tokens.get(BEGINS)
        memory = self._filled("documents")[:, -part.slots(part.training) :]  # [B, M]
        if part.compressed_slots:
            memory = torch.cat((self._filled("compressed.documents"), memory), 1)
        if not self._keeps:
            # A step of generation sees all keys in the cache, so that no empty slot may be there.
            memory = memory[:, memory.shape[1] - int((memory > EMPTY).sum(1).min()) :]
        self._slots = memory.shape[1]
        self.tokens, self.source = with_memory(tokens, memory)
        """Tokens of the segment, and of the memory and the segment."""
        if self._keeps:
            ends = tokens.get(NEXT_DOCUMENT)
            self._keep_documents(self._documents[:, -1:] if ends is None else ends[:, None])

    def states(self, layer: str) -> Tensor:
        """Return the hidden states [B, M, D] that a block reads of the segments before."""
        memory = self._get(layer)[:, -self._part.slots(self._part.training) :]
        if self._part.compressed_slots:
            memory = torch.cat((self._get(f"compressed.{layer}"), memory), 1)
        return memory[:, memory.shape[1] - self._slots :]

    def keep(self, layer: str, x: Tensor) -> Tensor:
        """Keep the hidden states x [B, T, D] of the segment for a block, behind those that are kept.

        Return x, with the loss of the compression attached, if there is one.
        """
        if not self._keeps:
            return x
        kept = self._get(layer)
        joined = torch.cat((kept, x.detach().to(kept.dtype)), 1)
        self._put(layer, joined[:, -kept.shape[1] :])
        if not self._part.compressed_slots:
            return x
        compress: Any = self._part.compress[layer]
        old = joined[:, : x.shape[1]].to(x.dtype)
        slots = compress(old)  # [B, T / c, D]
        self._append(f"compressed.{layer}", slots)
        loss = compress.reconstruction_loss(old, slots, self._compressed > EMPTY)
        weight = self._forward.aux_loss_weight
        return x if loss is None else attach(x, loss, weight)

    def _keep_documents(self, following: Tensor) -> None:
        """Keep the documents of the slots, counted from that of the token behind the segment, `following` [B, 1]."""
        documents = self._filled("documents")
        joined = torch.cat((documents, self._documents), 1)
        joined = torch.where(joined > EMPTY, joined - following, EMPTY)
        self._put("documents", joined[:, -documents.shape[1] :])
        if self._part.compressed_slots:
            first: Any = next(iter(self._part.compress.values()))
            self._compressed = first.documents(joined[:, : self._documents.shape[1]], EMPTY)
            before = self._filled("compressed.documents")
            before = torch.where(before > EMPTY, before - following, EMPTY)
            count = before.shape[1]
            self._put("compressed.documents", torch.cat((before, self._compressed), 1)[:, -count:])

    def _filled(self, name: str) -> Tensor:
        documents = self._get(name)
        return (
            documents
            if self._begins is None
            else documents.masked_fill(self._begins[:, None], EMPTY)
        )

    def _append(self, name: str, values: Tensor) -> None:
        kept = self._get(name)
        joined = torch.cat((kept, values.detach().to(kept.dtype)), 1)
        self._put(name, joined[:, -kept.shape[1] :])

    def _get(self, name: str) -> Tensor:
        return self._rows.get(f"{self._part.path}.{name}")

    def _put(self, name: str, value: Tensor) -> None:
        self._rows.put(f"{self._part.path}.{name}", value)


def with_memory(tokens: Tokens, documents: Tensor) -> tuple[Tokens, Tokens]:
    """Return the tokens of a segment, whose documents tell those of a memory apart, and the tokens of both.

    `documents` [B, M] are those of the memory, whose positions are before the segment's.
    """
    of_text = torch.zeros_like(tokens.ids) if tokens.documents is None else tokens.documents
    tokens = replace(tokens, documents=of_text, shared_values=SharedValues())
    slots = documents.shape[1]
    places = torch.arange(-slots, 0, device=documents.device).expand(len(documents), -1)
    both = Tokens(
        ids=torch.cat((torch.zeros_like(places), tokens.ids), 1),
        positions=torch.cat((places, tokens.positions), 1),
        documents=torch.cat((documents, of_text), 1),
        memory_tokens=slots,
        forward=tokens.forward,
    )
    return tokens, both


def check(stack: Any, dims: Dims, path: str, use: StackUse) -> list[Problem]:
    """List why the blocks of `stack` cannot read a memory of earlier segments; `path` is that of the memory."""
    problems = {problem.what: problem for problem in check_order(stack, dims, path, use)}
    for layer in range(stack.depth):
        for what, choices in unreadable(stack.block_config(layer), dims):
            problems.setdefault(what, Problem(path, what, choices=choices + take(None)))
    of_compression = check_compression(
        stack.segment_memory.compression, stack.segment_memory.eval_length, dims, path
    )
    return [*problems.values(), *of_compression]


def check_order(stack: Any, dims: Dims, path: str, use: StackUse) -> list[Problem]:
    """List why no block of `stack` can read what is left of earlier segments, at `path`."""
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
    return [
        Problem(path, what, choices=take(None) + choices)
        for is_so, what, choices in reasons
        if is_so
    ]


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


def unreadable(block: Any, dims: Dims) -> Iterator[tuple[str, tuple[Choice, ...]]]:
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
