"""Layers that are equal in their config, sharding and recomputation: few are simulated, the others follow from these.

Everything that a step takes is linear in the number of such layers, and so is the memory at each moment of it: a
moment is before or after the same layer, counted from the first or from the last one. So two steps, of which the
second has one period of layers more, have the figures of a step with any number of them.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from xscale.measure.op_tracer import OpTracer
from xscale.measure.traced_costs import Message, Peak, PhaseCost, TraceSegment
from xscale.mesh.axes import Degrees
from xscale.mesh.torch_private import tree_leaves
from xscale.nn.blocks.block import Block
from xscale.nn.blocks.stack import Stack
from xscale.parallel.config import ParallelConfig, RecomputeConfig
from xscale.parallel.recompute.activation_checkpointing import is_recomputed
from xscale.parallel.shard.sharded import to_local
from xscale.parallel.shard.zero import prefetched_blocks

LONGEST_PERIOD = 4
"""Most layers of a period that is looked for."""
MOST_IRREGULAR = 4
"""Most layers before the first period, such as dense ones before mixtures."""
OWN = frozenset({"layer", "path", "seed", "training", "sublayers_before"})
"""Attributes in which equal layers differ; what a pattern makes of the layer is compared by its layout."""
PLAIN = (bool, int, float, str, torch.dtype, BaseModel, type(None))
"""Types of attributes that are compared by their value; others by their type."""


@dataclass(frozen=True)
class Mark:
    """Where a segment of a simulated step begins: at a layer's forward, or at its backward."""

    stack: int
    backward: bool
    count: int
    """How often this layer was here before: micro-batches, and recomputation."""
    position: int
    """Index of the layer among those of its stack that are simulated."""


@dataclass(frozen=True)
class LayerVisit:
    """A mark by the distance of its layer from the first one, or from the last one."""

    stack: int
    backward: bool
    count: int
    from_last: bool
    distance: int

    @classmethod
    def of(cls, mark: Mark, from_last: bool, distance: int) -> "LayerVisit":
        """Return the visit of a mark."""
        return cls(mark.stack, mark.backward, mark.count, from_last, distance)


@dataclass(frozen=True)
class RepeatedLayers:
    """The layers of a stack: some irregular ones, `periods` equal periods, and the beginning of another one."""

    first: int
    """How many are irregular."""
    period: int
    periods: int
    layers: int
    margin: int = 1
    """Layers at each end that have neighbours of another kind: what is done for a later layer is not done there."""

    @property
    def begin(self) -> int:
        """Number of layers at the beginning that may do more than later ones.

        The first of a kind makes what others share, such as a mask.
        """
        return self.first + max(self.margin, self.period)

    @property
    def end(self) -> int:
        """Position from which on layers may do more or less than earlier ones."""
        return self.layers - self.margin

    @property
    def fewest(self) -> int:
        """Periods of the smaller one of the two steps: a layer of it is behind `begin` and before `end`."""
        layers = max(self.margin, self.period) + self.margin + 1
        return max(2, -(-layers // self.period))

    def without(self, periods: int) -> "RepeatedLayers":
        """Return the layers without that many periods."""
        return replace(
            self, periods=self.periods - periods, layers=self.layers - periods * self.period
        )


def find_repeated(
    model: nn.Module, parallel: ParallelConfig, degrees: Degrees, length: int
) -> dict[int, RepeatedLayers]:
    """Return the repeated layers by the number of the stack, where two steps with few of them take less than one.

    `length`: tokens of a sequence, for the layouts of patterns.
    """
    repeated = {}
    shared = _shared_parameters(model)
    # ZeRO-3 gathers a layer's parameters while one before it computes: in backward the next one's, in forward those of
    # `prefetched_blocks`.
    ahead = 1 + prefetched_blocks(parallel, degrees) if parallel.zero.stage == 3 else 0
    for number, stack in enumerate(stacks(model)):
        if stack.pass_names or stack.has_edges or not stack.stream.is_hidden_states:
            continue
        if any(id(parameter) in shared for parameter in stack.blocks.parameters()):
            continue
        forms = [_form(block, parallel.recompute, length) for block in stack.blocks.values()]
        layers = _find_period(forms, 1 + ahead)
        if layers is not None and 3 * layers.fewest <= layers.periods:
            repeated[number] = layers
    return repeated


def stacks(model: nn.Module) -> list[Stack]:
    """Return the stacks of a model or of a pipeline stage of it."""
    return [module for module in model.modules() if isinstance(module, Stack)]


def drop_layers(model: nn.Module, repeated: Mapping[int, RepeatedLayers], periods: int) -> None:
    """Remove that many periods of layers from each of the stacks."""
    for number, stack in enumerate(stacks(model)):
        if number in repeated:
            names, layers = list(stack.blocks), repeated[number]
            start = layers.first + layers.period
            for name in names[start : start + periods * layers.period]:
                del stack.blocks[name]


def mark_layers(model: nn.Module, tracer: OpTracer) -> None:
    """Have each layer mark the beginning of its forward and of its backward."""
    counts: Counter[tuple[int, bool, int]] = Counter()

    def mark(stack: int, backward: bool, position: int) -> None:
        key = (stack, backward, position)
        tracer.mark(Mark(stack, backward, counts[key], position))
        counts[key] += 1

    def watch(number: int, position: int, block: nn.Module) -> None:
        def begin(*_: Any) -> None:
            mark(number, False, position)

        def end(_: nn.Module, __: Any, out: Any) -> None:
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _: mark(number, True, position))  # type: ignore[no-untyped-call]
                    return

        block.register_forward_pre_hook(begin)
        block.register_forward_hook(end)

    for number, stack in enumerate(stacks(model)):
        for position, block in enumerate(stack.blocks.values()):
            watch(number, position, block)


def _shared_parameters(model: nn.Module) -> set[int]:
    """Return the parameters that several modules have."""
    owners: Counter[int] = Counter()
    for module in model.modules():
        owners.update({id(parameter) for parameter in module.parameters(recurse=False)})
    return {key for key, count in owners.items() if count > 1}


def _form(block: Any, recompute: RecomputeConfig, length: int) -> tuple[Any, ...]:
    """Return what decides how a layer computes and is stored: equal layers have equal forms."""
    assert isinstance(block, Block)
    parts = []
    for name, module in block.named_modules():
        parameters = [
            (key, parameter.dtype, tuple(parameter.shape), tuple(to_local(parameter).shape))
            for key, parameter in module.named_parameters(recurse=False)
        ]
        attributes = [
            (key, value if isinstance(value, PLAIN) else type(value))
            for key, value in sorted(vars(module).items())
            if not key.startswith("_") and key not in OWN
        ]
        parts.append((name, type(module), parameters, attributes, _layout(module, length)))
    return is_recomputed(block.path, recompute), parts


def _layout(module: nn.Module, length: int) -> bytes | None:
    """Return the blocks of keys that a pattern shows to a layer."""
    if getattr(module, "layout_block", None) is None or not hasattr(module, "block_layout"):
        return None
    build: Any = module.block_layout
    layout = build(length, 1)
    return None if layout is None else bytes(torch.as_tensor(layout).to(torch.uint8).numpy().data)


def _find_period(forms: Sequence[Any], margin: int) -> RepeatedLayers | None:
    """Return the shortest period that repeats from one of the first layers to the last one; None: there is none."""
    for period in range(1, LONGEST_PERIOD + 1):
        for first in range(MOST_IRREGULAR + 1):
            later = range(first + period, len(forms))
            if later and all(forms[at] == forms[at - period] for at in later):
                periods = (len(forms) - first) // period
                return RepeatedLayers(first, period, periods, len(forms), margin)
    return None


@dataclass(frozen=True)
class LinearFigures:
    """The figures of a step, each of which is linear in the number of repeated layers."""

    segments: Mapping[Hashable, TraceSegment]
    repeated: Mapping[int, RepeatedLayers]
    state_bytes: Mapping[str, int]
    costs: Mapping[str, PhaseCost]
    messages: Sequence[Message]
    parameters: int
    active: int
    host_bytes: int

    @classmethod
    def of(cls, step: Any) -> "LinearFigures":
        """Return those of a simulated step, which has them by the same names."""
        return cls(**{figure.name: getattr(step, figure.name) for figure in fields(cls)})


def extrapolate(fewer: LinearFigures, more: LinearFigures, periods: int) -> dict[str, Any] | None:
    """Return the figures with `periods` periods more than `fewer` has, of which `more` has one.

    None where layers that look equal were not: their segments differ.
    """
    segments, further = _anchored(fewer, fewer), _anchored(more, fewer)
    if segments.keys() != further.keys() or not _are_equal(more):
        return None
    peaks: list[Peak] = []
    for key, segment in segments.items():
        moments, later = segment.peaks, further[key].peaks
        if len(moments) != len(later):
            if isinstance(key, LayerVisit):
                return None
            # Such as the optimizer's, which may take the parameters in turn.
            moments, later = [segment.peak], [further[key].peak]
        peaks += [_linear_peak(*pair, periods) for pair in zip(moments, later, strict=True)]
    return {
        "peak": max(peaks, key=lambda peak: peak.total),
        "state_bytes": _linear_counts(fewer.state_bytes, more.state_bytes, periods),
        "costs": {
            phase: PhaseCost(
                *(
                    _linear(
                        getattr(fewer.costs.get(phase, NO_COST), name), getattr(cost, name), periods
                    )
                    for name in ("flops", "moved", "seconds")
                )
            )
            for phase, cost in more.costs.items()
        },
        "messages": [
            message
            for message, count in _linear_counts(
                Counter(fewer.messages), Counter(more.messages), periods
            ).items()
            for _ in range(count)
        ],
        **{
            name: _linear(getattr(fewer, name), getattr(more, name), periods)
            for name in ("parameters", "active", "host_bytes")
        },
    }


NO_COST = PhaseCost()


def _linear(fewer: Any, more: Any, periods: int) -> Any:
    return fewer + periods * (more - fewer)


def _linear_counts(
    fewer: Mapping[Any, int], more: Mapping[Any, int], periods: int
) -> dict[Any, int]:
    return {
        key: _linear(fewer.get(key, 0), more.get(key, 0), periods)
        for key in dict.fromkeys((*fewer, *more))
    }


def _linear_peak(fewer: Peak, more: Peak, periods: int) -> Peak:
    kinds = _linear_counts(fewer.kinds, more.kinds, periods)
    return Peak(sum(kinds.values()), more.phase, kinds)


def _anchored(figures: LinearFigures, fewer: LinearFigures) -> dict[Hashable, TraceSegment]:
    """Return the segments by their distance from the first layer, and from the last one, as far as `fewer` has both."""
    segments: dict[Hashable, TraceSegment] = {}
    for mark, segment in figures.segments.items():
        if not isinstance(mark, Mark) or mark.stack not in fewer.repeated:
            segments[mark] = segment
            continue
        layers = fewer.repeated[mark.stack]
        from_end = figures.repeated[mark.stack].layers - 1 - mark.position
        if mark.position < layers.end:
            segments[LayerVisit.of(mark, False, mark.position)] = segment
        if from_end < layers.layers - layers.begin:
            segments[LayerVisit.of(mark, True, from_end)] = segment
    return segments


def _are_equal(figures: LinearFigures) -> bool:
    """Return whether the layers of the periods do the same work, as far as a layer is behind and before them."""
    return all(
        (segment.flops, segment.moved) == (later.flops, later.moved)
        for segment, later in _neighbours(figures)
    )


def _neighbours(figures: LinearFigures) -> Iterator[tuple[TraceSegment, TraceSegment]]:
    """Yield the segments of each two layers that are a period apart and not in the margins."""
    for mark, segment in figures.segments.items():
        if not isinstance(mark, Mark) or mark.stack not in figures.repeated:
            continue
        layers = figures.repeated[mark.stack]
        later = Mark(mark.stack, mark.backward, mark.count, mark.position + layers.period)
        inner = layers.begin <= mark.position and later.position < layers.end
        if inner and later in figures.segments:
            yield segment, figures.segments[later]
