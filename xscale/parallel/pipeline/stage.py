"""A pipeline stage: a model with only its own blocks, under their own names, and stubs in place of the other modules.

The stubs have the protocols of what they replace, so that the model's own forward is the stage's forward.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

from torch import Tensor, nn

from xscale.nn.blocks.block import Block
from xscale.nn.blocks.stack import Stack
from xscale.nn.model.model import Model
from xscale.nn.module import substitute
from xscale.nn.roles import Role
from xscale.parallel.pipeline.split import (
    StageLayout,
    params_shared_by_blocks,
    stage_layout,
    stages_of_shared_params,
)
from xscale.parallel.pipeline.stubs import (
    NoHidden,
    PassThrough,
    ReceivedHandedOn,
    ReceivedHidden,
    ReceivedSentences,
    ReceivedStream,
    ReceivedTensor,
    SendHidden,
    SendSentences,
    SendStream,
    StageInput,
)
from xscale.parallel.roles import RoleTable, apply_table, seams_in


def _leave_out(module: nn.Module, seam: str) -> None:
    """Take a submodule away, or let a method that attaches a loss return its first argument."""
    part = getattr(module, seam)
    substitute(
        module, seam, None if part is None or isinstance(part, nn.Module) else lambda x, *_: x
    )


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
"""Role -> what all stages but the last do at a seam with it, called as (module, seam). For what is in a stack the last
stage is that of its last block."""
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
    is_tied = any(
        model.get_parameter(name) is model.get_submodule("head").weight for name in shared
    )
    # Multi-token prediction behind the last block looks tokens up.
    reads_table = is_tied or getattr(model, "mtp", None) is not None
    received = edges_read(model, blocks, index)
    passed = list(chain.from_iterable(blocks[:index]))
    sublayers = {name: sublayers_of(model, passed, name) for name in layout.stacks}
    sent = [] if last else list(edges_read(model, blocks, index + 1))
    ended: set[nn.Module] = set()
    """Modules of the stacks whose last block is in this stage."""
    for name in layout.stacks:
        stack: Any = model.get_submodule(name)
        if f"{name}.blocks.{list(stack.blocks)[-1]}" in paths:
            ended.update(stack.modules())
        _keep_blocks(stack, paths, name)
    if not last:
        apply_table(BEFORE_LAST, [module for module in model.modules() if module not in ended])
    if index:
        apply_table(AFTER_FIRST, model.modules())
    stage = PipelineStage(index, model, last)
    if len(layout.stacks) == 1:
        _one_stack(stage, layout, received, sent, sublayers, reads_table=reads_table)
    else:
        ends = {name for name in layout.stacks if model.get_submodule(name) in ended}
        _two_stacks(stage, layout, paths, received, sent, sublayers, ends, tied=last and is_tied)
    return stage


def sublayers_of(model: nn.Module, paths: Sequence[str], stack: str) -> int:
    """Return how many sublayers the blocks at `paths` have in that stack."""
    blocks = [model.get_submodule(path) for path in paths if path.startswith(f"{stack}.")]
    return sum(len(block.order) for block in blocks if isinstance(block, Block))


def _one_stack(
    stage: PipelineStage,
    layout: StageLayout,
    received: dict[str, StageInput],
    sent: list[str],
    sublayers: Mapping[str, int],
    *,
    reads_table: bool,
) -> None:
    """Put stubs into a model of one stack. `received` and `sent`: what blocks hand on beside the residual stream;
    `sublayers`: how many of each stack the stages before have."""
    stack = stage.model.get_submodule(layout.stacks[0])
    assert isinstance(stack, Stack)
    if not stage.first:
        about = StageInput(precise=stack.stream.precise)
        table = stage.last and reads_table
        _receive_hidden(stage, layout.inputs[0], about, has_table=table)
        _receive_stream(stage, stack, about, sublayers[layout.stacks[0]])
    _receive_edges(stage, stack, received)
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
    used = {
        name.split(".")[0]
        for name, _ in params_shared_by_blocks(stack, list(stack.blocks.values()))
    }
    if "position" not in used:
        substitute(stack, "position", None)
    if "core_tables" not in used:
        substitute(stack, "core_tables", None)
    if "position_tables" not in used:
        substitute(stack, "position_tables", None)


def _receive_hidden(
    stage: PipelineStage, name: str, about: StageInput, *, has_table: bool = False
) -> None:
    """Substitute a stub for the embedding `name`: the stage's next received tensor."""
    embed: Any = stage.model.get_submodule(name)
    table = embed.table if has_table else None
    substitute(stage.model, name, ReceivedHidden(name, stage.receive(about), table))


def edges_read(model: nn.Module, blocks: list[list[str]], index: int) -> dict[str, StageInput]:
    """Return what stage `index` receives beside hidden states, by name."""
    before, after = (list(chain.from_iterable(part)) for part in (blocks[:index], blocks[index:]))
    return sent_between(model, before, after)


def sent_between(
    model: nn.Module, before: Sequence[str], after: Sequence[str]
) -> dict[str, StageInput]:
    """Return what the blocks `before` pass on to those `after` them beside hidden states, by name."""
    layout = stage_layout(model)
    assert layout is not None
    for name in layout.stacks:
        paths_in_stack = [
            [path for path in paths if path.startswith(f"{name}.")] for paths in (before, after)
        ]
        if not all(paths_in_stack):
            # Between two stacks only the output of the first passes on.
            continue
        stack: Any = model.get_submodule(name)
        blocks = [[model.get_submodule(path) for path in paths] for paths in paths_in_stack]
        sent = {
            name: tensor for part in stack.passes() for name, tensor in part.sends(*blocks).items()
        }
        from_source = len(layout.stacks) > 1 and name == layout.stacks[0]
        return {
            name: StageInput(from_source=from_source, **vars(tensor))
            for name, tensor in sent.items()
        }
    return {}


def _receive_stream(stage: PipelineStage, stack: Stack, about: StageInput, sublayers: int) -> None:
    """Receive the residual stream of the previous stage, behind that many sublayers, but for the first of its tensors,
    which is in the place of the embeddings."""
    further = [stage.receive(about) for _ in range(stack.stream.sent(sublayers) - 1)]
    substitute(stack.stream, "begin", ReceivedStream(stack.stream.from_tensors, further))


def _receive_edges(stage: PipelineStage, stack: nn.Module, received: dict[str, StageInput]) -> None:
    """Receive what the stage's first block reads beside the residual stream."""
    if received:
        tensors = {name: stage.receive(about) for name, about in received.items()}
        substitute(stack, "first_edges", ReceivedHandedOn(tensors))


def _hand_on_sentences(stage: PipelineStage, name: str) -> None:
    """Receive and send the states of sentences by themselves, for the contrastive loss of the last stage; `name` is
    that of the embedding."""
    if not stage.first:
        hidden = stage.model.get_submodule(name)
        assert isinstance(hidden, ReceivedHidden)
        sentences = stage.receive(StageInput(sentences=True))
        substitute(stage.model, name, ReceivedSentences(hidden, sentences))


def _two_stacks(
    stage: PipelineStage,
    layout: StageLayout,
    paths: list[str],
    received: dict[str, StageInput],
    sent: list[str],
    sublayers: Mapping[str, int],
    ends: Collection[str],
    *,
    tied: bool,
) -> None:
    """Put stubs into an encoder-decoder. `tied`: the stage has a head with the table of the embeddings. `received` and
    `sent`: what blocks hand on beside the residual stream; `sublayers`: how many of each stack the stages before have;
    `ends`: the stacks whose last block is in this stage."""
    model = stage.model
    assert isinstance(model, Model)
    source, target = layout.inputs
    encoder, decoder = (seam for _, seam, _ in seams_in([model], Role.STACK))
    encodes, decodes = (
        any(path.startswith(f"{stack}.") for path in paths) for stack in (encoder, decoder)
    )
    starts_encoder, starts_decoder = (f"{stack}.blocks.0" in paths for stack in (encoder, decoder))
    # A decoder may read further inputs before the embeddings of the target.
    read_by_decoder = [
        seam for _, seam, _ in seams_in([model], Role.STACK_INPUT) if seam not in layout.inputs
    ]
    read_by_decoder.append(target)
    if decodes and not starts_decoder:
        for name in read_by_decoder:
            precise = name == target and _is_precise(model, decoder)
            _receive_hidden(stage, name, StageInput(precise=precise))
    if not starts_encoder:
        # Both embeddings use one table, whose name is the source's.
        about = _encoder_states(model, encoder, going_on=encodes)
        _receive_hidden(stage, source, about, has_table=starts_decoder or tied)
    # What a stage sends is of its last block, and what it receives of its first.
    for name, receives, sends in ((encoder, encodes, not decodes), (decoder, not encodes, decodes)):
        stack = model.get_submodule(name)
        assert isinstance(stack, Stack)
        if receives:
            about = StageInput(from_source=name == encoder, precise=stack.stream.precise)
            _go_on(stage, stack, about, received, sublayers[name])
        if sends and name not in ends:
            substitute(stack, "output", SendStream(stack.stream.to_tensors, sent))
    if not encodes:
        substitute(model, encoder, PassThrough())
    if not decodes:
        for name in read_by_decoder:
            substitute(model, name, NoHidden())
        substitute(model, decoder, PassThrough())
    elif not stage.last:
        model.get_submodule(decoder).register_forward_hook(_with_memory(model))


def _go_on(
    stage: PipelineStage,
    stack: Stack,
    about: StageInput,
    received: dict[str, StageInput],
    sublayers: int,
) -> None:
    """Receive the rest of the residual stream, `about` each of its tensors, and what blocks hand on, in a stage that
    begins in this stack, with so many sublayers before."""
    if "0" not in stack.blocks:
        _receive_stream(stage, stack, about, sublayers)
    _receive_edges(stage, stack, received)


def _is_precise(model: nn.Module, name: str) -> bool:
    """Whether the residual stream of that stack is in float32 at least."""
    stack: Any = model.get_submodule(name)
    return bool(stack.stream.precise)


def _encoder_states(model: nn.Module, encoder: str, *, going_on: bool) -> StageInput:
    """Describe what a stage receives of the encoder: the first tensor of its stream, where it is `going_on`, or its
    output."""
    if going_on:
        return StageInput(from_source=True, precise=_is_precise(model, encoder))
    stack: Any = model.get_submodule(encoder)
    counts = [count for part in stack.passes() if (count := part.states_of_output()) is not None]
    return StageInput(from_source=True, states=next(iter(counts), None))


def _with_memory(model: Model) -> Callable[..., tuple[Tensor, ...]]:
    """Return the hook by which a decoder sends its residual stream, the signals that its blocks read and its memory
    behind the first tensor, and at the end what its last block hands on."""

    def send(_: nn.Module, inputs: tuple[Any, ...], out: Any) -> tuple[Tensor, ...]:
        x, *further = out if isinstance(out, tuple) else (out,)
        return (
            x,
            *(inputs[1].get(signal) for signal in model.signals_of_decoder),
            inputs[2],
            *further,
        )

    return send
