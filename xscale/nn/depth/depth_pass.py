"""Protocol of what a stack does over its depth beside its blocks: halting, exits, pooling, budgets, mixes of layers.

A pass is asked before the first block, before and after each block, and at the end; what it changes is the `DepthState`
of the forward. It says what it sends to the next stage of a pipeline, and which layouts it allows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from xscale.core.errors import Problem
from xscale.nn.dims import Dims
from xscale.nn.module import Module
from xscale.nn.tokens import Tokens

Edges = dict[str, Tensor]
"""Tensors that blocks pass on beside the hidden states, by name. They are inputs and outputs of a block, so that
recomputation and the stages of a pipeline see them."""


@dataclass(frozen=True)
class SentTensor:
    """A tensor of `Edges` as a pipeline stage sends it to the next one."""

    score_heads: int | None = None
    """Heads of attention scores [B, H, T, S], over all ranks of tp; None: it is something else."""
    per_token: bool = False
    """Whether it is one number for each token, [B, T], in float32 at least."""
    values: bool = False
    """Whether it is the values [B, T, D / R] of the local heads."""
    precise: bool = False
    """Whether it is hidden states [B, T, D] in float32 at least."""
    states: int | None = None
    """N, if it is hidden states after several blocks, [N, B, T, D]; None: it is not."""


@dataclass(frozen=True)
class Prediction:
    """The prediction task of a forward: the model's head, and what it is to predict."""

    head: nn.Module
    """The model's head."""
    targets: Tensor | None
    """[B, T] token ids; None: no loss is asked for."""
    log_probabilities: list[Tensor] = field(default_factory=list)
    """[B, T, V] of each head so far, where their diversity has a loss."""


@dataclass(frozen=True)
class StackUse:
    """Wishes of a model for a stack, as far as its passes must know them."""

    cross: bool = False
    """Whether its blocks read an encoder's output."""
    predicts: bool = False
    """Whether the model's head reads this stack's output alone."""
    make_head: Callable[[], Any] | None = None
    """Builds one more head of the model's kind; None: the stack has no further heads."""
    returns_states: bool = False
    """Whether the output are the hidden states before and after all blocks, [depth + 1, B, T, D]."""
    mix: Module | None = None
    """Makes the memory of each block of such states of an encoder; None: each block reads the encoder's output."""
    repeats_windows: bool = True
    """Whether states of windows are repeated for the tokens in them, so that the output is [B, T, D]."""


@dataclass
class DepthState:
    """A forward on its way through a stack: what the next block reads. Passes change it."""

    x: Any
    """Hidden states [B, T, D], or all tensors of a residual stream of several."""
    tokens: Tokens
    memory: Any = None
    """The encoder's output [B, S, D], or other states that mixers of the next block read as keys and values."""
    source: Tokens | None = None
    """Tokens of `memory`."""
    prediction: Prediction | None = None
    """Task of the model's head on the output; None: the forward has no such task."""
    edges: Edges = field(default_factory=dict)
    layer: int = -1
    """Number of the block."""
    before: Any = None
    """The output of the block before: x as it was before any pass changed it for this one."""
    only_fills_cache: bool = False
    """Whether no token needs the output of the next blocks: they store in the cache what later tokens read."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Values that each pass keeps from hook to hook, by its `key`."""

    def enter(self, layer: int) -> None:
        """Begin with block `layer`."""
        self.layer, self.before = layer, self.x


class DepthPass(Module):
    """A mechanism over the depth of a stack, beside its blocks. Every hook does nothing unless a pass defines it."""

    key: ClassVar[str]
    """Name of the pass in its stack, and so of its parameters: `stack.halting.weight`."""
    config_key: ClassVar[str | None] = None
    """Key below `stack` that chooses it; None: it is called as the pass."""
    reads_hidden_states: ClassVar[str] = "a pass over the depth reads one"
    """A clause that says why it needs the hidden states between blocks, for the refusal of residual streams of several
    tensors; empty: it goes with any stream."""
    used_by_all_blocks: ClassVar[bool] = False
    """Whether every block computes with its parameters, so that each stage of a pipeline has a copy."""
    has_static_form: ClassVar[bool] = False
    """Whether a step of generation with it has a static form (`Module.why_not_static`)."""
    has_edges: ClassVar[bool] = False
    """Whether blocks pass on tensors of it beside the hidden states."""

    @classmethod
    def check(cls, config: Any, dims: Dims, path: str, use: StackUse) -> list[Problem]:
        """List what of the pass a stack of this `StackConfig`, at `path`, cannot have; `dims.depth` is its own."""
        return []

    @classmethod
    def build(
        cls, config: Any, dims: Dims, use: StackUse, blocks: Mapping[str, nn.Module]
    ) -> "DepthPass | Module | None":
        """Return the pass of a stack of this `StackConfig`; None: it has none. What it needs of blocks it sets here."""
        return None

    def why_not_static(self) -> str | None:
        static = self.has_static_form
        return None if static else f"the pass '{self.key}' over the depth has no static form"

    def start(self, state: DepthState) -> None:
        """Act before the first block."""

    def before_block(self, state: DepthState) -> None:
        """Act before block `state.layer`, which reads `state.x`."""

    def after_block(self, state: DepthState) -> None:
        """Act after block `state.layer`, whose output is `state.x` and whose input was `state.before`."""

    def finish(self, state: DepthState) -> None:
        """Act after the last block, before the final norm."""

    def map_output(self, x: Any, state: DepthState) -> Any:
        """Return the output of the stack for x [B, T, D], that of the final norm."""
        return x

    def predict(
        self, x: Tensor, tokens: Tokens, prediction: Prediction, head: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return what the model makes of the output x [B, T, D]: what `head` does, logits or the summed loss."""
        return head(x)

    def output_tokens(self, tokens: Tokens) -> Tokens:
        """Return the tokens of the stack's output, for those of its input."""
        return tokens

    def token_fractions(self, fractions: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Return the fractions of a sequence's tokens that are queries, and that are keys, of each block."""
        return fractions

    def sends(
        self, before: Sequence[nn.Module], after: Sequence[nn.Module]
    ) -> dict[str, SentTensor]:
        """Return what of `Edges` passes from the blocks `before` a stage of a pipeline to those from it on, `after`:
        blocks of this stack, of which there are some before it and some after."""
        return {}

    def states_of_output(self) -> int | None:
        """Return N, if the output of the stack is hidden states after several blocks, [N, B, T, D]; None: of one."""
        return None

    def keep_blocks(self, layers: Sequence[str]) -> None:
        """Drop the parameters of all blocks but these, which a stage of a pipeline has."""

    def heads_after_blocks(self) -> dict[int, Any]:
        """Return what predicts after inner blocks, by the number of the block."""
        return {}

    def replace_heads(self, make_head: Callable[[], Any]) -> None:
        """Replace heads of the language model by what `make_head` builds: the heads of an objective on labels."""

    def reads_full_sequence(self) -> str | None:
        """Return the key below `stack` by which it reads all tokens between the blocks, of which sequence parallelism
        gives each rank a shard; None: it reads each token by itself."""
        return None
