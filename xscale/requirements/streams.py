"""Requirements of contiguous streams of text, and of models that remember the segment before."""

from collections.abc import Iterator

from torch import nn

from xscale.core.choices import Choice
from xscale.core.errors import Problem
from xscale.core.registry import Entry
from xscale.core.requirements import kinds, take
from xscale.data.config import DataConfig
from xscale.nn.blocks.stack import Stack
from xscale.nn.depth.segment_memory.memory import SegmentMemory, position_reads_memory
from xscale.nn.model.embed import Embed
from xscale.nn.module import Module
from xscale.nn.position.position import POSITIONS
from xscale.objective.objective import OBJECTIVES, ObjectiveTraits
from xscale.settings.settings import RunConfig

KEY = "data.order"


def streams_are_of_one_text(
    data: DataConfig, objective_entry: Entry[ObjectiveTraits]
) -> Iterator[Problem]:
    """Streams are cut from one packed text."""
    if data.order != "streams":
        return
    shuffled = take("shuffled")
    reasons: list[tuple[bool, str, tuple[Choice, ...]]] = [
        (
            objective_entry.traits.samples != "packed",
            f"'{objective_entry.name}' reads no packed text, of which streams are segments",
            (),
        ),
        (
            bool(data.blend),
            "a stream would change from one dataset of the blend to another at each segment",
            take((), key="data.blend"),
        ),
        (
            data.from_caller,
            "the caller's samples have an order of their own",
            take(False, key="data.from_caller"),
        ),
    ]
    for is_so, what, choices in reasons:
        if is_so:
            yield Problem(KEY, what, choices=shuffled + choices)


def streams_stay_as_they_began(run: RunConfig, data: DataConfig) -> Iterator[Problem]:
    """A resumed run has the streams that it began with."""
    if data.order == "streams" and run.allow_changed:
        changed = " and ".join(run.allow_changed)
        what = (
            f"with another {changed} the rows would read other streams than those that they are in"
        )
        yield Problem("run.allow_changed", what, choices=take((), key="run.allow_changed"))


def memory_reads_streams(built_model: nn.Module, data: DataConfig) -> Iterator[Problem]:
    """A model that keeps a state between segments reads segments that follow each other."""
    if data.order != "streams":
        for path in _with_memory(built_model):
            what = (
                f"{path} reads what the segment before has left, and {data.order} samples follow "
                "none of their row"
            )
            yield Problem(KEY, what, choices=take("streams") + take(None, key=path))


def memory_reads_text_as_it_is(
    built_model: nn.Module, objective_entry: Entry[ObjectiveTraits], data: DataConfig
) -> Iterator[Problem]:
    """A model that keeps a state between segments reads their tokens in the order of the text."""
    traits = objective_entry.traits
    if data.order != "streams" or not (traits.random or traits.padded or traits.prefix):
        return
    able = [
        name
        for name in OBJECTIVES.able(causal=True, source=False, random=False, prefix=False)
        if OBJECTIVES.get(name).traits.samples == "packed"
    ]
    for path in _with_memory(built_model):
        what = (
            f"{path} would remember what '{objective_entry.name}' makes of a segment, and no text"
        )
        yield Problem("objective", what, choices=kinds(able, "objective") + take(None, key=path))


def distances_to_memory_are_told(built_model: nn.Module) -> Iterator[Problem]:
    """Positions within a segment do not tell its tokens from those of the segments before."""
    stacks = [
        (path, part)
        for path, part in built_model.named_modules()
        if isinstance(part, Stack) and part.find(SegmentMemory) is not None
    ]
    embeds = [part for part in built_model.modules() if isinstance(part, Embed)]
    positions = [part.position for part in embeds if part.position is not None]
    for position in positions if stacks else ():
        key = f"model.{stacks[0][0]}.{SegmentMemory.key}"
        what = (
            f"'{position.Config.kind}' counts from each segment anew, and {key} reads those before"
        )
        able = [entry.name for entry in POSITIONS if position_reads_memory(entry.name)]
        yield Problem(
            "model.position", what, choices=kinds(able, "model.position") + take(None, key=key)
        )


def _with_memory(model: nn.Module) -> list[str]:
    """Return the paths of the parts of the model's stacks that keep a state between segments."""
    stacks = [(path, part) for path, part in model.named_modules() if isinstance(part, Stack)]
    return [
        f"model.{path}.{part.config_key or part.key}"
        for path, stack in stacks
        for part in stack.passes()
        if isinstance(part, Module) and part.carries()
    ]


REQUIREMENTS = (
    streams_are_of_one_text,
    streams_stay_as_they_began,
    memory_reads_streams,
    memory_reads_text_as_it_is,
    distances_to_memory_are_told,
)
