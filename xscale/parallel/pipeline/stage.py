"""A stage: a model that keeps only its blocks, by their names, and substitutes where others have theirs.

In the place of what other stages compute stand modules of the same protocol: Entrance gives what came from the stage
before, Passing and Exit let through what goes to the next one. So the model's own forward is the stage's.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from xscale.nn.linear import Embedding
from xscale.nn.module import Module
from xscale.nn.stack import Stack
from xscale.nn.tokens import Tokens
from xscale.parallel.pipeline.split import form_of, holders


class Entrance(Module):
    """In the place of an embedding: hidden states that were received. It keeps the table that a head here shares."""

    def __init__(self, path: str, table: Embedding | None = None) -> None:
        super().__init__()
        self.path = path
        self.table = table
        self.hidden: Tensor | None = None
        """[B, T, D] of the micro-batch that is about to pass."""

    def forward(self, tokens: Tokens) -> Tensor | None:
        return self.hidden


class Passing(Module):
    """In the place of a stack that is elsewhere: an encoder gives its input on, a decoder the memory."""

    def forward(
        self, x: Tensor | None, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor | None:
        return x if memory is None else memory


class Exit(Module):
    """In the place of the head: what goes to the next stage."""

    def forward(self, x: Any, *others: Any) -> Any:
        return x


@dataclass
class Stage:
    """One stage of the model on this rank."""

    index: int
    model: nn.Module
    entrances: list[Entrance]
    """Where what was received goes in, in the order in which it is sent."""
    reads: list[bool]
    """Of each entrance: whether its tokens are the source's."""
    last: bool

    @property
    def first(self) -> bool:
        return not self.entrances

    def enter(self, received: list[Tensor]) -> None:
        """Lay what was received in place for the next forward."""
        for entrance, hidden in zip(self.entrances, received, strict=True):
            entrance.hidden = hidden

    def leave(self) -> None:
        """Let go of it."""
        for entrance in self.entrances:
            entrance.hidden = None


def make_stage(model: nn.Module, parts: list[list[str]], index: int) -> Stage:
    """Turn a whole model on meta into stage `index`, in place."""
    form = form_of(model)
    assert form is not None
    kept = set(holders(model, parts))
    paths, last = parts[index], index == len(parts) - 1
    tied = {name for name in kept if model.get_parameter(name) is model.get_submodule("head").weight}
    for stack in form.stacks:
        _keep_blocks(model.get_submodule(stack), paths, stack)
    if not last:
        model.head = Exit()
    stage = Stage(index, model, [], [], last)
    if len(form.stacks) == 1:
        if index:
            _enter(stage, "embed", reads=False, table=last and bool(tied))
    else:
        _two_stacks(stage, paths, last and bool(tied))
    return stage


def _keep_blocks(stack: nn.Module, paths: list[str], name: str) -> None:
    assert isinstance(stack, Stack)
    final = list(stack.blocks)[-1]
    for layer in list(stack.blocks):
        if f"{name}.blocks.{layer}" not in paths:
            del stack.blocks[layer]
    if final not in stack.blocks:
        stack.norm = None


def _enter(stage: Stage, name: str, *, reads: bool, table: bool) -> None:
    """Substitute an entrance for the embedding `name`; through it comes the next of what is received."""
    embed: Any = stage.model.get_submodule(name)
    entrance = Entrance(name, embed.table if table else None)
    setattr(stage.model, name, entrance)
    stage.entrances.append(entrance)
    stage.reads.append(reads)


def _two_stacks(stage: Stage, paths: list[str], tied: bool) -> None:
    model = stage.model
    encodes = any(path.startswith("encoder.") for path in paths)
    decodes = any(path.startswith("decoder.") for path in paths)
    begins = "decoder.blocks.0" in paths
    if decodes and not begins:
        _enter(stage, "target", reads=False, table=False)
    if "encoder.blocks.0" not in paths:
        # Both ways in use one table, which is called the source's.
        _enter(stage, "source", reads=True, table=begins or tied)
    if not encodes:
        model.encoder = Passing()
    if not decodes:
        model.target = Entrance("target")
        model.decoder = Passing()
    elif not stage.last:
        model.get_submodule("decoder").register_forward_hook(_with_memory)


def _with_memory(_: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> tuple[Tensor, Tensor]:
    return out, inputs[2]
