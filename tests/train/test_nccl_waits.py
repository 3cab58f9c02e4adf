"""Pipelines of the real trainer under NCCL's rules: no host waits while a receive is posted.

On NCCL a posted receive is a kernel that holds its stream until the message comes, and its sender may need this rank to
go on first. On gloo nothing waits for it. The ranks train on gloo, and what would wait on NCCL is recorded while a
receive is posted and not waited for:

- the host waits for the whole device: `torch.cuda.synchronize`, which waits for sends too, and what creates a
  communicator, the first message of two ranks;
- the host waits for other hosts: a barrier, pickled objects, a collective of the gloo group beside NCCL;
- the host reads a number of the device. That waits for the stream that computes, not for the receive. Layers of these
  models read nothing all the same, except for the counts of a dispatch over ranks.

The timer of the phases believes in a GPU, and its events are stand-ins.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.distributed import Pool, RankError
from tests.train.test_host_waits import FFNS, HostWaits, ListsRead, model
from tests.train.tiny import losses, recipe, run
from xscale.nn.ffn.moe.moe import Moe
from xscale.parallel.pipeline.executor import Pipeline
from xscale.parallel.pipeline.microbatch_runner import MicrobatchRunner
from xscale.parallel.pipeline.schedule import SCHEDULES
from xscale.step.phase_timer import PhaseTimer
from xscale.train.loop import Loop

BY_THE_HOST = (
    *("barrier", "monitored_barrier", "all_gather_object", "gather_object", "broadcast_object_list"),
    *("scatter_object_list", "new_group"),
)
"""Functions of torch.distributed for which the host waits on NCCL too."""
COLLECTIVES = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


class HostWaitError(Exception):
    """The host waited while a receive was posted."""


class PostedMessage:
    """A send or a receive that occupies its stream until `wait`."""

    def __init__(self, work: Any, name: str, posted: dict["PostedMessage", None]) -> None:
        self.work, self.name, self.posted = work, name, posted
        posted[self] = None

    def wait(self, *arguments: Any) -> Any:
        self.posted.pop(self, None)
        return self.work.wait(*arguments)

    def is_completed(self) -> bool:
        """Whether the message came: not before someone waits for it, in the worst case."""
        return self not in self.posted


class NcclRules:
    """The posted receives of this rank, and the waits that happened meanwhile."""

    def __init__(self, reads: bool) -> None:
        self.reads = reads
        self.posted: dict[PostedMessage, None] = {}
        self.sent: dict[PostedMessage, None] = {}
        self.most = 0
        """Receives that were posted at one time."""
        self.waits: list[str] = []
        self.connected: set[tuple[str, int]] = set()
        self.background = ""
        """Name of the gloo group beside NCCL's."""

    def host_waits(self, call: str, *, device: bool = False) -> None:
        """Record that the host waits in `call`, if a receive is posted; with `device` also if a send is."""
        pending = [*self.posted, *(self.sent if device else ())]
        if not pending:
            return
        frame = sys._getframe(1)
        while "/xscale/" not in frame.f_code.co_filename and frame.f_back is not None:
            frame = frame.f_back
        where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        self.waits.append(f"{call} at {where} while posted: {pending[0].name}")

    def read(self, name: str) -> None:
        if self.reads:
            self.host_waits(name)

    def blocking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, for which the host waits."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.host_waits(function.__name__)
            return function(*args, **kwargs)

        return call

    def collective(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, for which the host waits in the gloo group beside NCCL's."""

        def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
            if group is not None and group.group_name == self.background:
                self.host_waits(f"{function.__name__} over gloo")
            return function(*args, group=group, **kwargs)

        return call

    def message(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` is isend or irecv."""

        def call(tensor: Any, peer: int, group: Any = None, **kwargs: Any) -> Any:
            pair = ("" if group is None else group.group_name, peer)
            if pair not in self.connected:
                self.host_waits(f"the first {function.__name__} with rank {peer}")
                self.connected.add(pair)
            with torch._C.DisableTorchFunction():  # it would call the function by its name in the module
                work = function(tensor, peer, group=group, **kwargs)
            name = f"{function.__name__} of {list(tensor.shape)} {'to' if function is isend else 'from'} rank {peer}"
            message = PostedMessage(work, name, self.sent if function is isend else self.posted)
            self.most = max(self.most, len(self.posted))
            return message

        return call


isend, irecv = distributed_c10d.isend, distributed_c10d.irecv


class Reads(HostWaits):
    """Reports each read of a number of the device."""

    def __init__(self, record: Callable[[str], None]) -> None:
        super().__init__()
        self.record = record  # type: ignore[method-assign]


class StandInEvent:
    """An event of a device that is always done."""

    def __init__(self, rules: NcclRules) -> None:
        self._rules = rules

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._rules.host_waits("Event.synchronize", device=True)

    def elapsed_time(self, end: "StandInEvent") -> float:
        return 0.0


@contextmanager
def nccl_rules(reads: bool) -> Iterator[NcclRules]:
    """Record in the block what would wait on NCCL; HostWaitError at its end names the waits and the receives."""
    rules, loop_run = NcclRules(reads), Loop.run

    def run_loop(loop: Loop) -> Any:
        background = loop.parts.mesh.background
        rules.background = "" if background is None else background.group_name
        loop.parts.stepper.timer = PhaseTimer(torch.device("cuda"))
        with ListsRead(rules.read, ("tolist", "cpu", "numpy")), Reads(rules.read):
            return loop_run(loop)

    with pytest.MonkeyPatch.context() as patch:
        for module in (dist, distributed_c10d):
            patch.setattr(module, "isend", rules.message(isend))
            patch.setattr(module, "irecv", rules.message(irecv))
        for name in BY_THE_HOST:
            patch.setattr(dist, name, rules.blocking(getattr(dist, name)))
        for name in COLLECTIVES:
            patch.setattr(dist, name, rules.collective(getattr(dist, name)))
        patch.setattr(torch.cuda, "synchronize", lambda _=None: rules.host_waits("torch.cuda.synchronize", device=True))
        patch.setattr(torch.cuda, "Event", lambda **_: StandInEvent(rules))
        patch.setattr(Moe, "fixed_shapes", lambda self, flat: True)
        patch.setattr(Loop, "run", run_loop)
        yield rules
    assert not rules.posted | rules.sent, "a message is still on its way when the run is over"
    if rules.waits:
        raise HostWaitError("\n".join(dict.fromkeys(rules.waits)))


def train_under_nccl_rules(
    folder: Path, name: str, ffn: str, parallel: dict[str, Any], broken: str = "", *, reads: bool = True
) -> int:
    """Train for two steps with an evaluation and a save; the most receives that were posted at one time.

    HostWaitError names the waits while a receive was posted. `reads`: reads of the device's numbers are among them.
    """
    micro_batches = 4 * dist.get_world_size() // 2
    train = {"steps": 2, "batch_size": micro_batches, "micro_batch_size": 1, "eval_every": 2, "eval_sequences": 2}
    # The first stage and the last are on one rank of a V, which cannot have the table twice.
    tied = not SCHEDULES[parallel["pipeline"]["schedule"]].v_shaped
    settings = recipe(folder, name, model={**model(4, FFNS[ffn]), "tied": tied}, parallel=parallel, train=train)
    with pytest.MonkeyPatch.context() as patch, nccl_rules(reads) as rules:
        if broken:
            BROKEN[broken](patch)
        run(settings)
    assert len(losses(folder, name)) == 2
    return rules.most


def synchronize_in_phases(patch: pytest.MonkeyPatch) -> None:
    """Let the timer wait for the device at the end of each phase."""
    timed = PhaseTimer.phase

    @contextmanager
    def phase(self: PhaseTimer, name: str) -> Iterator[None]:
        with timed(self, name):
            yield
        torch.cuda.synchronize()

    patch.setattr(PhaseTimer, "phase", phase)


def select_by_mask(patch: pytest.MonkeyPatch) -> None:
    """Let a mixture drop rows by a mask, whose number of ones the host has to know."""
    patch.setattr(Moe, "fixed_shapes", lambda self, flat: False)


def connect_late(patch: pytest.MonkeyPatch) -> None:
    """Let the first step create the communicators, with receives that are posted early."""
    patch.setattr(Pipeline, "connect", lambda self: None)
    patch.setattr(Pipeline, "_has_trained", lambda self, batches: True)


def create_groups(patch: pytest.MonkeyPatch) -> None:
    """Let each action create a group."""
    run_action = MicrobatchRunner.run

    def run_in_group(self: MicrobatchRunner, action: Any, received: Any) -> Any:
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return run_action(self, action, received)

    patch.setattr(MicrobatchRunner, "run", run_in_group)


BROKEN = {
    "synchronize": synchronize_in_phases,
    "mask": select_by_mask,
    "connect": connect_late,
    "group": create_groups,
}


def pipeline(schedule: str, **mesh: int) -> dict[str, Any]:
    return {"mesh": {"pp": 2, **mesh}, "pipeline": {"schedule": schedule}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data of all runs."""
    return tmp_path_factory.mktemp("runs")


QUICK = ("1f1b-dense", "interleaved_1f1b-capacity", "zero_bubble-capacity")


def marks_of(case: str) -> Any:
    if case in QUICK:
        return ()
    return pytest.mark.long if case.endswith(("dense", "capacity")) else pytest.mark.nightly


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=marks_of(case))
        for case in (f"{schedule}-{ffn}" for schedule in SCHEDULES for ffn in FFNS)
    ],
)
def test_no_host_waits_while_a_receive_is_posted(case: str, folder: Path, pool: Pool) -> None:
    schedule, ffn = case.split("-")
    most = pool.run(train_under_nccl_rules, 2, folder, case, ffn, pipeline(schedule))
    assert max(most) >= 1


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_experts_on_several_ranks_read_counts_only(schedule: str, folder: Path, pool: Pool) -> None:
    """The counts of a dispatch wait for the stream that computes; nothing waits for the device."""
    parallel = {**pipeline(schedule, ep=2), "zero": {"stage": 2 if SCHEDULES[schedule].splits_backward else 3}}
    most = pool.run(train_under_nccl_rules, 4, folder, f"{schedule}-ep2", "dropless", parallel, reads=False)
    assert max(most) >= 1


@pytest.mark.parametrize(
    ("broken", "call"),
    [
        ("synchronize", r"torch\.cuda\.synchronize at \S+ while posted: irecv of \[1, 32, 32\] from rank [01]"),
        ("mask", r"index at \S+ while posted: irecv of \[1, 32, 32\] from rank [01]"),
        ("connect", r"the first isend with rank 0 at \S+ while posted: irecv of \[1, 32, 32\] from rank 0"),
        ("group", r"new_group at executor\.py\S+ while posted: irecv of \[1, 32, 32\] from rank [01]"),
    ],
    ids=BROKEN,
)
def test_a_wait_beside_a_receive_is_named(broken: str, call: str, folder: Path, pool: Pool) -> None:
    """Negative controls: a timer, a layer and a pipeline that wait as this trainer's once did."""
    with pytest.raises(RankError, match=call) as failed:
        pool.run(train_under_nccl_rules, 2, folder, broken, "capacity", pipeline("1f1b"), broken)
    assert all("HostWaitError" in text for text in failed.value.texts.values())
