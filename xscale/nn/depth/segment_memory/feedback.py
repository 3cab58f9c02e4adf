"""Fan et al. 2020: Feedback Transformer, all blocks attend to one memory of all blocks at earlier tokens.

    m_t = sum_l w_l x_t^l,  w = softmax(alpha),  l = 0 ... L,
    x_t^(l+1) = block l of x_t^l, whose attention has keys and values of m_(t-M) ... m_(t-1)

x^0 are the embeddings (sections 3.1 and 3.2). A token needs the highest block's output of the token before, so that
they are computed one after the other. The last M memories of a segment are those before the first token of the next.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from xscale.core.config import Config, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import KeyNeed, take
from xscale.nn.depth.depth_pass import DepthPass, DepthState, StackUse
from xscale.nn.depth.segment_memory.memory import EMPTY, check_order, unreadable
from xscale.nn.dims import Dims
from xscale.nn.init import ZEROS
from xscale.nn.random import reseed
from xscale.nn.segment_state import BEGINS, NEXT_DOCUMENT, SEGMENT_STATE, CarriedTensor
from xscale.nn.tokens import Tokens


class FeedbackConfig(Config):
    length: PositiveInt
    """M, tokens before each token whose memories it reads."""


class FeedbackMemory(DepthPass):
    """The memory of all blocks; it calls the blocks itself, for a token at a time."""

    key = "feedback"
    reads_hidden_states = "the memory is a mean of them over the blocks"
    alpha: Parameter

    def __init__(self, config: FeedbackConfig, dims: Dims, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.length, self.width = config.length, dims.width
        self._blocks = tuple(blocks.values())
        # All blocks weigh the same at first.
        self.declare("alpha", (dims.depth + 1,), ("state",), ZEROS, decays=False)

    @classmethod
    def build(
        cls, config: Any, dims: Dims, use: StackUse, blocks: Mapping[str, nn.Module]
    ) -> "FeedbackMemory | None":
        if config.feedback is None:
            return None
        for block in blocks.values():
            part: Any = block
            part.reads_memory |= set(part.mixers())
        return cls(config.feedback, dims, blocks)

    @classmethod
    def check(cls, config: Any, dims: Dims, path: str, use: StackUse) -> list[Problem]:
        if config.feedback is None:
            return []
        where = f"{path}.{cls.key}"
        problems = {problem.what: problem for problem in check_order(config, dims, where, use)}
        for key in ("segment_memory", "segment_summary", "exits"):
            if getattr(config, key) is not None:
                what = f"the blocks are called for one token at a time, and {key} reads them of all"
                choices = take(None) + take(None, key=f"{path}.{key}")
                problems[what] = Problem(where, what, choices=choices)
        for layer in range(config.depth):
            for what, choices in unreadable(config.block_config(layer), dims):
                problems.setdefault(what, Problem(where, what, choices=choices + take(None)))
        return list(problems.values())

    def needs(self) -> list[KeyNeed]:
        leave_out = ((".", None),)
        stages = "the first block of a token reads what the last one makes of the token before"
        shards = "a token reads all tokens before it, one after the other"
        saved = "the blocks are called for one token at a time, whose inputs are all that is read"
        graph = "the state of the rows is another tensor after each step"
        shapes = "the blocks are called with another length of memory for each token"
        return [
            KeyNeed("parallel.mesh.pp", (1,), stages, leave_out),
            KeyNeed("parallel.mesh.cp", (1,), shards, leave_out),
            KeyNeed("parallel.recompute.every", (0,), saved, leave_out),
            KeyNeed("parallel.cuda_graphs", (False,), graph, leave_out),
            KeyNeed("parallel.compile", (False,), shapes, leave_out),
        ]

    def reads_full_sequence(self) -> str | None:
        return self.key

    def carries(self) -> Mapping[str, CarriedTensor]:
        return {
            "documents": CarriedTensor((self.length,), torch.int64, EMPTY),
            "memory": CarriedTensor((self.length, self.width)),
        }

    def before_block(self, state: DepthState) -> None:
        """Compute all blocks for each token, before the first one; none is called again."""
        if state.layer == 0:
            state.kept[self.key] = self._all_tokens(state.x, state.tokens)
            state.only_fills_cache = True

    def finish(self, state: DepthState) -> None:
        state.x = state.kept.pop(self.key)
        state.only_fills_cache = False

    def _all_tokens(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Return the output of the last block [B, T, D] for the embeddings x [B, T, D]."""
        past = PastTokens(self, tokens, x)
        weights = self.use(self.alpha).softmax(0).to(x.dtype)
        outputs = []
        for index in range(x.shape[1]):
            h, memory, of_token, of_memory = past.inputs(x, index)
            states = [h]
            for block in self._blocks:
                h = self._pass_block(block, h, of_token, memory, of_memory, index)
                states.append(h)
            past.append(index, torch.einsum("l,lbtd->btd", weights, torch.stack(states)))
            outputs.append(h)
        past.keep()
        return torch.cat(outputs, 1)

    def _pass_block(
        self, block: Any, h: Tensor, token: Tokens, memory: Tensor, source: Tokens, index: int
    ) -> Tensor:
        """Return the output [B, 1, D] of a block for one token, the one at `index`."""
        if token.forward.rng_seed is not None:
            # As the stack does for a block and all of its tokens.
            reseed(token.forward.rng_seed, f"{block.path}.{index}")
            token = token.with_forward(rng_seed=0)
        out: Tensor = block(h, token, memory, source)
        if token.forward.stats is not None:
            token.forward.stats.add_recorded()
        return out


class PastTokens:
    """The memories of the tokens so far, behind a slot of zeros that every token sees, M + 1 tokens before it."""

    def __init__(self, part: FeedbackMemory, tokens: Tokens, x: Tensor) -> None:
        """Begin with the memories of the segment before, or in a step of generation with those in the cache."""
        self._part, self._tokens = part, tokens
        self._rows, cache = tokens.get(SEGMENT_STATE), tokens.forward.cache
        self._keeps = self._rows is not None and cache is None
        self._of_text = (
            torch.zeros_like(tokens.ids) if tokens.documents is None else tokens.documents
        )
        if cache is not None and part.path in cache:
            self._memories, self._documents = cache[part.path]
            return
        memory, documents = self._before(x)
        self._memories = [memory[:, slot : slot + 1] for slot in range(part.length)]
        self._documents = [documents[:, slot : slot + 1] for slot in range(part.length)]
        if cache is not None:
            cache[part.path] = self._memories, self._documents

    def _before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return memories [B, M, D] before the segment and their documents [B, M]; empty slots if there are none."""
        name, length = self._part.path, self._part.length
        if self._rows is None:
            empty = self._of_text.new_full((len(x), length), EMPTY)
            return x.new_zeros(len(x), length, x.shape[2]), empty
        documents, begins = self._rows.get(f"{name}.documents"), self._tokens.get(BEGINS)
        if begins is not None:
            documents = documents.masked_fill(begins[:, None], EMPTY)
        return self._rows.get(f"{name}.memory").to(x.dtype), documents

    def inputs(self, x: Tensor, index: int) -> tuple[Tensor, Tensor, Tokens, Tokens]:
        """Return the embedding [B, 1, D] of the token at `index` of x, memories [B, S, D], and the tokens of both."""
        h = x[:, index : index + 1]
        tokens, length = self._tokens, self._part.length
        memory = torch.cat((torch.zeros_like(h), *self._memories[-length:]), 1)
        document = self._of_text[:, index : index + 1]
        position = tokens.positions[:, index : index + 1]
        count = memory.shape[1]
        # Keys and values are of memories, which a cache of the mixers would not tell from tokens.
        forward = replace(tokens.forward, cache=None)
        of_token = Tokens(tokens.ids[:, index : index + 1], position, document, forward=forward)
        of_memory = Tokens(
            of_token.ids.expand(-1, count),
            position + torch.arange(-count, 0, device=position.device),
            torch.cat((document, *self._documents[-length:]), 1),
            memory_tokens=count,
            forward=forward,
        )
        return h, memory, of_token, of_memory

    def append(self, index: int, memory: Tensor) -> None:
        """Append the memory [B, 1, D] of the token at `index`."""
        self._memories.append(memory)
        self._documents.append(self._of_text[:, index : index + 1])

    def keep(self) -> None:
        """Keep the last memories for the next segment, with documents counted from that of its first token."""
        if not self._keeps or self._rows is None:
            return
        name, length = self._part.path, self._part.length
        ends = self._tokens.get(NEXT_DOCUMENT)
        following = self._of_text[:, -1:] if ends is None else ends[:, None]
        documents = torch.cat(self._documents[-length:], 1)
        self._rows.put(
            f"{name}.documents", torch.where(documents > EMPTY, documents - following, EMPTY)
        )
        self._rows.put(f"{name}.memory", torch.cat(self._memories[-length:], 1))
