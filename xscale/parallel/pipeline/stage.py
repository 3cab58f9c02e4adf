"""A pipeline stage: a model with only its own blocks, under their own names, and stubs in place of the other modules.

The stubs have the protocols of what they replace: ReceivedHidden returns the hidden states from the previous stage,
PassThrough and SendHidden forward what the next stage needs. So the model's own forward is the stage's forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, Protocol

from torch import Tensor, nn

from xscale.nn.depth.depth_pass import Edges
from xscale.nn.depth.edges import CONTENT
from xscale.nn.linear import Embedding
from xscale.nn.model.disentangled import Disentangled
from xscale.nn.module import Module, substitute
from xscale.nn.reversible import Streams, upcast_copy
from xscale.nn.roles import Role
from xscale.nn.sentence_contrast import SENTENCES
from xscale.nn.stack import Stack
from xscale.nn.tokens import Tokens
from xscale.parallel.pipeline.split import params_shared_by_blocks, stage_layout, stages_of_shared_params
from xscale.parallel.roles import RoleTable, apply_table


@dataclass(frozen=True)
class StageInput:
    """A tensor that a stage receives: hidden states, or scores or values that a block hands to the next."""

    from_source: bool = False
    """Whether the tokens of the hidden states are the source's."""
    score_heads: int | None = None
    """Heads of the attention scores, over all ranks of tp; None: hidden states."""
    stream: bool = False
    """Whether the hidden states are one of the two residual streams of reversible blocks, in float32 at least."""
    per_token: bool = False
    """Whether it is one number for each token, the sum of its gates so far, in float32 at least."""
    values: bool = False
    """Whether it is the values of the first layer, of the local heads."""
    sentences: bool = False
    """Whether the tokens are those of the masked sentences by themselves, for a contrastive loss, if there is one."""


class Received(Protocol):
    """A stub that gives a received tensor to the next forward."""

    received: Tensor | None


class ReceivedHidden(Module):
    """Stub for an embedding: returns received hidden states. Has the table if the stage's head is tied to it, or its
    multi-token prediction reads it."""

    def __init__(self, path: str, table: Embedding | None = None) -> None:
        super().__init__()
        self.path = path
        self.table = table
        self.received: Tensor | None = None
        """[B, T, D] of the next micro-batch."""

    def forward(self, *_: Any) -> Tensor | None:
        return self.received


class ReceivedSentences(ReceivedHidden):
    """Stub for the embedding of a model with a contrastive loss: also returns states of sentences by themselves."""

    def __init__(self, path: str, table: Embedding | None, sentences: "HiddenStub") -> None:
        super().__init__(path, table)
        self.sentences = sentences

    def forward(self, tokens: Tokens) -> Tensor | None:
        alone = self.sentences.received
        return self.received if alone is None or tokens.get(SENTENCES) is not None else alone


class HiddenStub:
    """States of the sentences by themselves, [B * K, M + N, D] of the next micro-batch; None: there is no loss."""

    received: Tensor | None = None


class SendSentences(Module):
    """Stub for the contrastive loss: the states of the sentences by themselves follow those of the text."""

    def attach_loss(self, x: Tensor, tokens: Tokens, alone: Tensor, sentences: Tokens) -> tuple[Tensor, Tensor]:
        return x, alone


class ReceivedEdges:
    """Stub for what the previous stage's last block hands on: scores by sublayer, values, sums of gates."""

    def __init__(self, names: Sequence[str]) -> None:
        self.stubs = {name: EdgeStub() for name in names}

    def __call__(self) -> Edges:
        return {name: stub.received for name, stub in self.stubs.items() if stub.received is not None}


class EdgeStub:
    """One of these tensors, of the next micro-batch."""

    received: Tensor | None = None


class ReceivedStream:
    """Second residual stream of the previous stage's last block, [B, T, D] of the next micro-batch."""

    received: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        assert self.received is not None
        return upcast_copy(self.received)


def send_streams(x: Streams, edges: Edges, tokens: Tokens) -> tuple[Tensor, ...]:
    """Output of a stack whose next block is in another stage and has two residual streams: both."""
    return x.first, x.second


class SendEdges:
    """Output of a stack whose next block is in another stage and reads what this one's last block hands on, which
    follows the hidden states."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def __call__(self, x: Tensor, edges: Edges, tokens: Tokens) -> tuple[Tensor, ...]:
        return x, *(edges[name] for name in self.names)


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
    stubs: list[Received]
    """Stubs for the received tensors, in the order in which they are sent."""
    inputs: list[StageInput]
    """Descriptions of the received tensors, in the same order."""
    last: bool

    @property
    def first(self) -> bool:
        return not self.inputs

    def feed(self, received: list[Tensor]) -> None:
        """Set the received tensors for the next forward; those of sentences, the last ones, may be absent."""
        assert len(received) <= len(self.stubs)
        for stub, tensor in zip_longest(self.stubs, received):
            stub.received = tensor

    def clear(self) -> None:
        """Release the received tensors."""
        for stub in self.stubs:
            stub.received = None


def make_stage(model: nn.Module, blocks: list[list[str]], index: int) -> PipelineStage:
    """Turn a full model on meta into stage `index`, in place."""
    layout = stage_layout(model)
    assert layout is not None
    paths, last = blocks[index], index == len(blocks) - 1
    shared = set(stages_of_shared_params(model, blocks))
    tied = {name for name in shared if model.get_parameter(name) is model.get_submodule("head").weight}
    received = edges_read(model, blocks, index)
    sent = [] if last else list(edges_read(model, blocks, index + 1))
    for name in layout.stacks:
        _keep_blocks(model.get_submodule(name), paths, name)
    looks_up = getattr(model, "mtp", None) is not None
    if not last:
        apply_table(BEFORE_LAST, model.modules())
    if index:
        apply_table(AFTER_FIRST, model.modules())
    stage = PipelineStage(index, model, [], [], last)
    if len(layout.stacks) == 1:
        stack = model.get_submodule(layout.stacks[0])
        assert isinstance(stack, Stack)
        if index:
            _add_input(
                stage, "embed", from_source=False, table=last and (bool(tied) or looks_up), stream=stack.reversible
            )
        _hand_on_edges(stage, stack, received, sent)
        if stack.reversible:
            _hand_on_streams(stage, stack)
        # The last input, which an evaluation lacks.
        if getattr(model, "contrast", None) is not None:
            _hand_on_sentences(stage)
    else:
        assert not received, "only a model of one stack sends attention scores or values"
        _two_stacks(stage, paths, last and bool(tied))
    return stage


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


def _add_input(stage: PipelineStage, name: str, *, from_source: bool, table: bool, stream: bool = False) -> None:
    """Substitute a stub for the embedding `name`: the stage's next received tensor."""
    embed: Any = stage.model.get_submodule(name)
    stub = ReceivedHidden(name, embed.table if table else None)
    substitute(stage.model, name, stub)
    stage.stubs.append(stub)
    stage.inputs.append(StageInput(from_source=from_source, stream=stream))


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


def _hand_on_edges(stage: PipelineStage, stack: nn.Module, received: dict[str, StageInput], sent: list[str]) -> None:
    """Receive what the stage's first block reads beside hidden states, and send what the next stage's reads."""
    if received:
        edges = ReceivedEdges(list(received))
        substitute(stack, "first_edges", edges)
        stage.stubs += edges.stubs.values()
        stage.inputs += received.values()
    if sent:
        substitute(stack, "output", SendEdges(sent))


def _hand_on_sentences(stage: PipelineStage) -> None:
    """Receive and send the states of sentences by themselves, for the contrastive loss of the last stage."""
    if stage.index:
        embed, stub = stage.model.get_submodule("embed"), HiddenStub()
        assert isinstance(embed, ReceivedHidden)
        substitute(stage.model, "embed", received := ReceivedSentences(embed.path, embed.table, stub))
        stage.stubs[stage.stubs.index(embed)] = received
        stage.stubs.append(stub)
        stage.inputs.append(StageInput(sentences=True))


def _hand_on_streams(stage: PipelineStage, stack: Stack) -> None:
    """Receive the second residual stream of the previous stage, and send both to the next."""
    if stage.index:
        stub = ReceivedStream()
        substitute(stack, "second_stream", stub)
        stage.stubs.append(stub)
        stage.inputs.append(StageInput(stream=True))
    if not stage.last:
        substitute(stack, "output", send_streams)


def _two_stacks(stage: PipelineStage, paths: list[str], tied: bool) -> None:
    model = stage.model
    encodes = any(path.startswith("encoder.") for path in paths)
    decodes = any(path.startswith("decoder.") for path in paths)
    starts_decoder = "decoder.blocks.0" in paths
    # A disentangled decoder's blocks read the embeddings of the target beside the hidden states.
    disentangled = isinstance(model, Disentangled)
    if decodes and not starts_decoder:
        if disentangled:
            _add_input(stage, "queries", from_source=False, table=False)
        _add_input(stage, "target", from_source=False, table=False)
    if "encoder.blocks.0" not in paths:
        # Both embeddings use one table, whose name is the source's.
        _add_input(stage, "source", from_source=True, table=starts_decoder or tied)
    if not encodes:
        substitute(model, "encoder", PassThrough())
    if not decodes:
        substitute(model, "target", ReceivedHidden("target"))
        substitute(model, "decoder", PassThrough())
        if disentangled:
            substitute(model, "queries", ReceivedHidden("queries"))
    elif not stage.last:
        model.get_submodule("decoder").register_forward_hook(_with_content if disentangled else _with_memory)


def _with_memory(_: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> tuple[Tensor, Tensor]:
    return out, inputs[2]


def _with_content(_: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return out, inputs[1].get(CONTENT), inputs[2]
