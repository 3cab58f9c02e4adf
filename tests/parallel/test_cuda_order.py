"""Pipeline schedules in the order of CUDA and NCCL: no rank waits, through its host or a stream, for itself.

The executor runs for each rank with a channel and stages that only record what they do. From the records comes a graph
of what waits for what on GPUs. A cycle is a deadlock.

- A host does one thing after another. A kernel waits for its launch and for the kernel before it on its stream.
- A message is one kernel on both ranks, on a stream of its pair and direction. It starts when both ranks have launched
  it and have computed what they launched before it, and ends on both at once: a receive holds its stream until then.
- `wait()` of a message makes later computation wait, not the host.
- The first message of a pair creates its communicator, at which both hosts wait for each other.
- Reading a number of the device (a mixture's counts) makes the host wait for the computation launched so far;
  `torch.cuda.synchronize` makes it wait for the messages too.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from xscale.nn.tokens import Tokens
from xscale.parallel.config import ParallelConfig, PipelineConfig
from xscale.parallel.pipeline import executor
from xscale.parallel.pipeline.check import check_micro_batches
from xscale.parallel.pipeline.executor import Pipeline, PipelineSpec
from xscale.parallel.pipeline.p2p import P2PChannel
from xscale.parallel.pipeline.schedule import SCHEDULES, schedule_of
from xscale.parallel.pipeline.stubs import StageInput

SHAPE = (1, 1, 1)


class Event(NamedTuple):
    kind: str
    """compute, message, wait, read or synchronize."""
    communicator: tuple[str, int, int] = ("", 0, 0)
    number: int = 0
    """Number of the message on its communicator, from 0."""


@dataclass
class RecordedWork:
    events: list[Event]
    message: Event

    def wait(self) -> None:
        self.events.append(self.message._replace(kind="wait"))


class RecordedChannel(P2PChannel):
    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count, self.device, self.dtype = rank, count, torch.device("cpu"), torch.float32
        self._announced, self._receiving, self._local = {}, {}, {}
        self._sending = deque()
        self.on_wait = lambda message: None
        self.events: list[Event] = []
        self.counts: dict[tuple[str, int, int], int] = {}

    def _start(self, operation: Any, tensor: Tensor, peer: int, to: int) -> Any:
        source = self.rank if operation is dist.isend else peer
        communicator = ("forward" if source < to else "backward", min(peer, self.rank), max(peer, self.rank))
        number = self.counts[communicator] = self.counts.get(communicator, -1) + 1
        message = Event("message", communicator, number)
        self.events.append(message)
        return RecordedWork(self.events, message)

    def _global_rank(self, peer: int) -> int:
        return peer


@dataclass
class MicroBatch:
    tokens: Tokens
    targets: Tensor = field(default_factory=lambda: torch.zeros(1))
    source: Tokens | None = None


@dataclass
class RecordingRunner:
    """Computes nothing; results have the shapes that the executor sends."""

    events: list[Event]
    reads: bool
    nats: Tensor = field(default_factory=lambda: torch.zeros(()))

    def run(self, action: Any, received: list[Tensor]) -> Any:
        self.events.append(Event("compute"))
        if self.reads:
            self.events.append(Event("read"))
        return torch.zeros(SHAPE) if action.kind == "F" else [torch.zeros(SHAPE)]


@dataclass(frozen=True)
class Order:
    """Waits of the hosts besides the schedule."""

    reads: bool
    """Each action reads a number of the device."""
    connected: bool = True
    """Communicators are created before the first step."""
    prefetch_first: bool = False
    """The first step posts receives early too."""
    synchronize: bool = False
    """Each phase ends by waiting for the device."""


def record(
    config: PipelineConfig, pp: int, micros: int, order: Order, patch: Callable[[str, Any], None]
) -> list[list[Event]]:
    """Events of each rank in two steps; `patch` sets names of the executor's module."""
    schedule = schedule_of(config)
    stages = schedule.stages(config, pp)
    spec = PipelineSpec(config, stages, 1, [[StageInput()]] * stages, {}, 0)
    programs = []
    for rank in range(pp):
        channel = RecordedChannel(rank, pp)
        pipeline = Pipeline.__new__(Pipeline)
        nn.Module.__init__(pipeline)
        pipeline.stages = {stage: cast(Any, None) for stage in range(stages) if schedule.rank_of(stage, pp) == rank}
        pipeline.spec, pipeline.channel, pipeline._trained_shapes = spec, channel, set()
        pipeline._all_reduce_shared_grads = lambda: None  # type: ignore[method-assign]
        runner = RecordingRunner(channel.events, order.reads)
        patch("MicrobatchRunner", lambda *_, runner=runner: runner)

        @contextmanager
        def phase(name: str, events: list[Event] = channel.events) -> Iterator[None]:
            yield
            if order.synchronize:
                events.append(Event("synchronize"))

        if order.connected:
            pipeline.connect()
        batches = [MicroBatch(Tokens.from_ids(torch.zeros(1, 1, dtype=torch.long))) for _ in range(micros)]
        if order.prefetch_first:
            pipeline._has_trained(batches)
        for _ in range(2):
            pipeline.step(batches, None, 1.0, phase)  # type: ignore[arg-type]
        programs.append(channel.events)
    return programs


def graph(programs: list[list[Event]]) -> dict[Any, set[Any]]:
    """Node -> the nodes that it waits for."""
    waits: dict[Any, set[Any]] = {}
    for rank, events in enumerate(programs):
        host: Any = ("start", rank)
        compute: Any = host
        launched: set[Any] = set()
        used: set[tuple[str, int, int]] = set()
        for at, event in enumerate(events):
            before, host = host, ("host", rank, at)
            waits[host] = {before}
            message = ("message", event.communicator, event.number)
            if event.kind == "compute":
                kernel = ("kernel", rank, at)
                waits[kernel], compute = {host, compute}, kernel
            elif event.kind == "message":
                if event.communicator not in used:
                    used.add(event.communicator)
                    creation = ("communicator", event.communicator)
                    waits.setdefault(creation, set()).add(before)
                    waits[host].add(creation)
                waits.setdefault(message, set()).update({host, compute})
                if event.number:
                    waits[message].add(("message", event.communicator, event.number - 1))
                launched.add(message)
            elif event.kind == "wait":
                kernel = ("kernel", rank, at)
                waits[kernel], compute = {compute, message}, kernel
            else:
                waits[host].add(compute)
                if event.kind == "synchronize":
                    waits[host] |= launched
    return waits


def deadlocks(programs: list[list[Event]]) -> bool:
    waits = graph(programs)
    remaining = {node: {other for other in others if other in waits} for node, others in waits.items()}
    waited_by: dict[Any, list[Any]] = {}
    for node, others in remaining.items():
        for other in others:
            waited_by.setdefault(other, []).append(node)
    ready = [node for node, others in remaining.items() if not others]
    done = 0
    while ready:
        node = ready.pop()
        done += 1
        for other in waited_by.get(node, ()):
            remaining[other].discard(node)
            if not remaining[other]:
                ready.append(other)
    return done < len(remaining)


CASES = [
    (name, pp, micros)
    for name in SCHEDULES
    for pp in (2, 3, 4, 8)
    for micros in (pp, 2 * pp, 4 * pp)
    if not check_micro_batches(
        ParallelConfig.model_validate({"mesh": {"pp": pp}, "pipeline": {"schedule": name}}), micros, ""
    )
]


def deadlocked(monkeypatch: pytest.MonkeyPatch, name: str, order: Order, most: int = 8) -> list[bool]:
    """Whether the ranks wait for each other, in each case of a schedule with at most `most` ranks."""
    config = PipelineConfig.model_validate({"schedule": name})
    patch = partial(monkeypatch.setattr, executor)
    return [
        deadlocks(record(config, pp, micros, order, patch))
        for schedule, pp, micros in CASES
        if schedule == name and pp <= most
    ]


@pytest.mark.parametrize(("most", "least_cases"), [(3, 4), pytest.param(8, 8, marks=pytest.mark.long)])
@pytest.mark.parametrize("reads", [False, True], ids=["dense", "mixture"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_waits_for_itself(
    monkeypatch: pytest.MonkeyPatch, name: str, reads: bool, most: int, least_cases: int
) -> None:
    cases = deadlocked(monkeypatch, name, Order(reads), most)
    assert len(cases) >= least_cases
    assert not any(cases)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_device_wait_at_the_end_of_each_phase_is_a_deadlock(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Negative control: a receive posted early is waited for by the rank for whose message its sender waits."""
    assert all(deadlocked(monkeypatch, name, Order(reads=False, synchronize=True), most=4))


def test_a_communicator_that_an_early_receive_creates_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: communicators created on first use, and hosts that wait in each action, as a mixture's do."""
    assert any(deadlocked(monkeypatch, "gpipe", Order(reads=True, connected=False, prefetch_first=True)))
    assert not any(deadlocked(monkeypatch, "gpipe", Order(reads=False, connected=False, prefetch_first=True)))
