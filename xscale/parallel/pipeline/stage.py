"""A pipeline stage: a model with only its own blocks, under their own names, and stubs in place of the other modules.

The stubs have the protocols of what they replace. Received* return a tensor of the previous stage, which is in a
`ReceivedTensor`; Send* and PassThrough forward what the next stage needs; NoHidden stands where nothing is read. So the
model's own forward is the stage's forward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

from torch import Tensor, nn

from xscale.nn.blocks.block import Block
from xscale.nn.blocks.stack import Stack
from xscale.nn.head.sentence_contrast import SENTENCES
from xscale.nn.linear import Embedding
from xscale.nn.model.model import Model
from xscale.nn.module import Module, substitute
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens
from xscale.parallel.pipeline.split import (
    StageLayout,
    params_shared_by_blocks,
    stage_layout,
    stages_of_shared_params,
)
from xscale.parallel.roles import RoleTable, apply_table, seams_in


@dataclass(frozen=True)
class StageInput:
    """A tensor that a stage receives: hidden states, or scores or values that a block hands to the next."""

    from_source: bool = False
    """Whether the tokens of the hidden states are the source's."""
    score_heads: int | None = None
    """Heads of the attention scores, over all ranks of tp; None: hidden states."""
    precise: bool = False
    """Whether it is a tensor of a residual stream in float32 at least."""
    per_token: bool = False
    """Whether it is one number for each token, the sum of its gates so far, in float32 at least."""
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

    def attach_loss(self, x: Tensor, tokens: Tokens, alone: Tensor, sentences: Tokens) -> tuple[Tensor, Tensor]:
        return x, alone


@dataclass(frozen=True)
class ReceivedHandedOn:
    """Stub for what the previous stage's last block hands on: scores by sublayer, values, sums of gates."""

    tensors: Mapping[str, ReceivedTensor]

    def __call__(self) -> dict[str, Tensor]:
        return {name: tensor.value for name, tensor in self.tensors.items() if tensor.value is not None}


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
        self, x: Tensor | None, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor | None:
        return x if memory is None else memory

    def output_tokens(self, tokens: Tokens) -> Tokens:
        """Return the tokens of the memory: a pipeline's encoder does not shorten the source."""
        return tokens


class SendHidden(Module):
    """Stub for the head: returns what the next stage needs."""

    def forward(self, x: Any, *further_inputs: Any) -> Any:
        return x


def _leave_out(module: nn.Module, seam: str) -> None:
    """Take a submodule away, or let a method that attaches a loss return its first argument."""
    part = getattr(module, seam)
    substitute(module, seam, None if part is None or isinstance(part, nn.Module) else lambda x, *_: x)


def _send_hidden(model: nn.Module, seam: str) -> None:
    """Return what the next stage needs in place of the output."""
    substitute(model, seam, SendHidden())


def _send_sentences(model: nn.Module, seam: str) -> None:
    """Send the states of sentences by themselves behind those of the text."""
    if getattr(model, seam) is not None:
        substitute(model, seam, SendSentences())


BEFORE_LAST: RoleTable = {
    Role.MODEL_OUTPUT: _send_hidden,
    Role.ON_LAST_STAGE: _leave_out,
    Role.SENTENCE_LOSS: _send_sentences,
}
"""Role -> what all stages but the last do at a seam with it, called as (module, seam)."""
AFTER_FIRST: RoleTable = {Role.ON_FIRST_STAGE: _leave_out}
"""Role -> what all stages but the first do."""


@dataclass
class PipelineStage:
    """One stage of the model on this rank."""

    index: int
    model: nn.Module
    last: bool
    received: list[ReceivedTensor] = field(default_factory=list)
    """The tensors that the stubs read, in the order in which they are sent."""

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def inputs(self) -> list[StageInput]:
        """Descriptions of the received tensors."""
        return [tensor.about for tensor in self.received]

    def receive(self, about: StageInput) -> ReceivedTensor:
        """Return where a stub reads the next tensor that the stage receives."""
        self.received.append(ReceivedTensor(about))
        return self.received[-1]

    def feed(self, values: list[Tensor]) -> None:
        """Set the received tensors for the next forward; those of sentences, the last ones, may be absent."""
        assert len(values) <= len(self.received)
        for tensor, value in zip_longest(self.received, values):
            tensor.value = value

    def clear(self) -> None:
        """Release the received tensors."""
        for tensor in self.received:
            tensor.value = None


def make_stage(model: nn.Module, blocks: list[list[str]], index: int) -> PipelineStage:
    """Turn a full model on meta into stage `index`, in place."""
    layout = stage_layout(model)
    assert layout is not None
    paths, last = blocks[index], index == len(blocks) - 1
    shared = set(stages_of_shared_params(model, blocks))
    is_tied = any(model.get_parameter(name) is model.get_submodule("head").weight for name in shared)
    # Multi-token prediction behind the last block looks tokens up.
    reads_table = is_tied or getattr(model, "mtp", None) is not None
    received = edges_read(model, blocks, index)
    before = [model.get_submodule(path) for path in chain.from_iterable(blocks[:index])]
    sublayers = sum(len(block.order) for block in before if isinstance(block, Block))
    sent = [] if last else list(edges_read(model, blocks, index + 1))
    for name in layout.stacks:
        _keep_blocks(model.get_submodule(name), paths, name)
    if not last:
        apply_table(BEFORE_LAST, model.modules())
    if index:
        apply_table(AFTER_FIRST, model.modules())
    stage = PipelineStage(index, model, last)
    if len(layout.stacks) == 1:
        _one_stack(stage, layout, received, sent, sublayers, reads_table=reads_table)
    else:
        assert not received, "only a model of one stack sends attention scores or values"
        _two_stacks(stage, layout, paths, tied=last and is_tied)
    return stage


def _one_stack(
    stage: PipelineStage,
    layout: StageLayout,
    received: dict[str, StageInput],
    sent: list[str],
    sublayers: int,
    *,
    reads_table: bool,
) -> None:
    """Put stubs into a model of one stack. `received` and `sent`: what blocks hand on beside the residual stream;
    `sublayers`: how many the stages before have."""
    stack = stage.model.get_submodule(layout.stacks[0])
    assert isinstance(stack, Stack)
    if not stage.first:
        _receive_stream(stage, stack, layout.inputs[0], sublayers, has_table=stage.last and reads_table)
    if received:
        tensors = {name: stage.receive(about) for name, about in received.items()}
        substitute(stack, "first_edges", ReceivedHandedOn(tensors))
    if not stage.last:
        substitute(stack, "output", SendStream(stack.stream.to_tensors, sent))
    # The last input, which an evaluation lacks.
    if getattr(stage.model, "contrast", None) is not None:
        _hand_on_sentences(stage, layout.inputs[0])


def _keep_blocks(stack: nn.Module, paths: list[str], name: str) -> None:
    assert isinstance(stack, Stack)
    final = list(stack.blocks)[-1]
    for layer in list(stack.blocks):
        if f"{name}.blocks.{layer}" not in paths:
            del stack.blocks[layer]
    if final not in stack.blocks:
        substitute(stack, "norm", None)
    for part in stack.passes():
        part.keep_blocks(list(stack.blocks))
    used = {name.split(".")[0] for name, _ in params_shared_by_blocks(stack, list(stack.blocks.values()))}
    if "position" not in used:
        substitute(stack, "position", None)
    if "core_tables" not in used:
        substitute(stack, "core_tables", None)
    if "position_tables" not in used:
        substitute(stack, "position_tables", None)


def _receive_hidden(stage: PipelineStage, name: str, about: StageInput, *, has_table: bool = False) -> None:
    """Substitute a stub for the embedding `name`: the stage's next received tensor."""
    embed: Any = stage.model.get_submodule(name)
    table = embed.table if has_table else None
    substitute(stage.model, name, ReceivedHidden(name, stage.receive(about), table))


def edges_read(model: nn.Module, blocks: list[list[str]], index: int) -> dict[str, StageInput]:
    """Return what stage `index` receives beside hidden states, by name."""
    before, after = (list(chain.from_iterable(part)) for part in (blocks[:index], blocks[index:]))
    return sent_between(model, before, after)


def sent_between(model: nn.Module, before: Sequence[str], after: Sequence[str]) -> dict[str, StageInput]:
    """Return what the blocks `before` pass on to those `after` them beside hidden states, by name."""
    layout = stage_layout(model)
    assert layout is not None
    stacks = [model.get_submodule(name) for name in layout.stacks]
    blocks = [[model.get_submodule(path) for path in paths] for paths in (before, after)]
    passes = [part for stack in stacks if isinstance(stack, Stack) for part in stack.passes()]
    return {name: StageInput(**vars(tensor)) for part in passes for name, tensor in part.sends(*blocks).items()}


def _receive_stream(stage: PipelineStage, stack: Stack, embed: str, sublayers: int, *, has_table: bool) -> None:
    """Receive the residual stream of the previous stage, behind that many sublayers: the first of its tensors in the
    place of the embedding `embed`."""
    about = StageInput(precise=stack.stream.precise)
    _receive_hidden(stage, embed, about, has_table=has_table)
    further = [stage.receive(about) for _ in range(stack.stream.sent(sublayers) - 1)]
    substitute(stack.stream, "begin", ReceivedStream(stack.stream.from_tensors, further))


def _hand_on_sentences(stage: PipelineStage, name: str) -> None:
    """Receive and send the states of sentences by themselves, for the contrastive loss of the last stage; `name` is
    that of the embedding."""
    if not stage.first:
        hidden = stage.model.get_submodule(name)
        assert isinstance(hidden, ReceivedHidden)
        sentences = stage.receive(StageInput(sentences=True))
        substitute(stage.model, name, ReceivedSentences(hidden, sentences))


def _two_stacks(stage: PipelineStage, layout: StageLayout, paths: list[str], *, tied: bool) -> None:
    """Put stubs into an encoder-decoder. `tied`: the stage has a head with the table of the embeddings."""
    model = stage.model
    assert isinstance(model, Model)
    source, target = layout.inputs
    encoder, decoder = (seam for _, seam, _ in seams_in([model], Role.STACK))
    encodes, decodes = (any(path.startswith(f"{stack}.") for path in paths) for stack in (encoder, decoder))
    starts_encoder, starts_decoder = (f"{stack}.blocks.0" in paths for stack in (encoder, decoder))
    # A decoder may read further inputs before the embeddings of the target.
    read_by_decoder = [seam for _, seam, _ in seams_in([model], Role.STACK_INPUT) if seam not in layout.inputs]
    read_by_decoder.append(target)
    if decodes and not starts_decoder:
        for name in read_by_decoder:
            _receive_hidden(stage, name, StageInput())
    if not starts_encoder:
        # Both embeddings use one table, whose name is the source's.
        _receive_hidden(stage, source, StageInput(from_source=True), has_table=starts_decoder or tied)
    if not encodes:
        substitute(model, encoder, PassThrough())
    if not decodes:
        for name in read_by_decoder:
            substitute(model, name, NoHidden())
        substitute(model, decoder, PassThrough())
    elif not stage.last:
        model.get_submodule(decoder).register_forward_hook(_with_memory(model))


def _with_memory(model: Model) -> Callable[..., tuple[Tensor, ...]]:
    """Return the hook by which a decoder sends its output, the signals that its blocks read, and its memory."""

    def send(_: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> tuple[Tensor, ...]:
        return out, *(inputs[1].get(signal) for signal in model.signals_of_decoder), inputs[2]

    return send
