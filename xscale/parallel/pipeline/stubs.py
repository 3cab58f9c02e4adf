"""Stubs in place of modules that a pipeline stage does not have, and the descriptions of what they receive and send.

They have the protocols of what they replace. Received* return a tensor of the previous stage, which is in a
`ReceivedTensor`; Send* and PassThrough forward what the next stage needs; NoHidden stands where nothing is read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from xscale.nn.head.sentence_contrast import SENTENCES
from xscale.nn.linear import Embedding
from xscale.nn.module import Module
from xscale.nn.tokens import Tokens


@dataclass(frozen=True)
class StageInput:
    """A tensor that a stage receives: hidden states, or scores or values that a block hands to the next."""

    from_source: bool = False
    """Whether the tokens of the hidden states are the source's."""
    score_heads: int | None = None
    """Heads of the attention scores, over all ranks of tp; None: hidden states."""
    precise: bool = False
    """Whether it is hidden states, or a tensor of a residual stream, in float32 at least."""
    per_token: bool = False
    """Whether it is one number for each token, such as the sum of its gates so far, in float32 at least."""
    states: int | None = None
    """N, if it is hidden states after several blocks, [N, B, T, D]; None: of one block."""
    values: bool = False
    """Whether it is the values of the first layer, of the local heads."""
    sentences: bool = False
    """Whether the tokens are those of the masked sentences by themselves, for a contrastive loss, if there is one."""


@dataclass
class ReceivedTensor:
    """Where a stub reads a tensor of the previous stage: that of the next micro-batch."""

    about: StageInput
    value: Tensor | None = None
    """None: it was not sent, as the states of sentences in an evaluation."""


class ReceivedHidden(Module):
    """Stub for an embedding: returns received hidden states [B, T, D]. Has the table if the stage's head is tied to it,
    or its multi-token prediction reads it."""

    def __init__(self, path: str, hidden: ReceivedTensor, table: Embedding | None = None) -> None:
        super().__init__()
        self.path = path
        self.hidden = hidden
        self.table = table

    def forward(self, *_: Any) -> Tensor | None:
        return self.hidden.value


class ReceivedSentences(ReceivedHidden):
    """Stub for the embedding of a model with a contrastive loss: also returns the states of the sentences by
    themselves, [B * K, M + N, D]."""

    def __init__(self, hidden: ReceivedHidden, sentences: ReceivedTensor) -> None:
        super().__init__(hidden.path, hidden.hidden, hidden.table)
        self.sentences = sentences

    def forward(self, tokens: Tokens) -> Tensor | None:
        alone = self.sentences.value
        return self.hidden.value if alone is None or tokens.get(SENTENCES) is not None else alone


class NoHidden(Module):
    """Stub for an embedding whose output no block of the stage reads."""

    def forward(self, *_: Any) -> None:
        return None


class SendSentences(Module):
    """Stub for the contrastive loss: the states of the sentences by themselves follow those of the text."""

    def attach_loss(
        self, x: Tensor, tokens: Tokens, alone: Tensor, sentences: Tokens
    ) -> tuple[Tensor, Tensor]:
        return x, alone


@dataclass(frozen=True)
class ReceivedHandedOn:
    """Stub for what the previous stage's last block hands on: scores by sublayer, values, sums of gates."""

    tensors: Mapping[str, ReceivedTensor]

    def __call__(self) -> dict[str, Tensor]:
        return {
            name: tensor.value for name, tensor in self.tensors.items() if tensor.value is not None
        }


@dataclass(frozen=True)
class ReceivedStream:
    """Stub for the start of a stack: the residual stream of the previous stage's last block."""

    from_tensors: Callable[[tuple[Tensor, ...]], Any]
    further: Sequence[ReceivedTensor]
    """Its tensors but for the first, which takes the place of the embedding."""

    def __call__(self, x: Tensor) -> Any:
        values = [tensor.value for tensor in self.further]
        return self.from_tensors((x, *(value for value in values if value is not None)))


@dataclass(frozen=True)
class SendStream:
    """Output of a stack whose next block is in another stage: the residual stream, and behind it what this one's last
    block hands on."""

    to_tensors: Callable[[Any], tuple[Tensor, ...]]
    names: Sequence[str]

    def __call__(self, stream: Any, handed_on: dict[str, Tensor], tokens: Tokens) -> Any:
        tensors = (*self.to_tensors(stream), *(handed_on[name] for name in self.names))
        return tensors if len(tensors) > 1 else tensors[0]


class PassThrough(Module):
    """Stub for a stack of another stage: an encoder returns its input, a decoder the memory."""

    def forward(
        self,
        x: Tensor | None,
        tokens: Tokens,
        memory: Tensor | None = None,
        source: Tokens | None = None,
        *_: Any,
    ) -> Tensor | None:
        return x if memory is None else memory

    def output_tokens(self, tokens: Tokens) -> Tokens:
        """Return the tokens of the memory: a pipeline's encoder does not shorten the source."""
        return tokens


class SendHidden(Module):
    """Stub for the head: returns what the next stage needs."""

    def forward(self, x: Any, *further_inputs: Any) -> Any:
        return x
