"""Pipeline schedules: the order in which each rank runs forwards and backwards of micro-batches through its stages.

GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019, PipeDream), interleaved 1F1B (Narayanan et al. 2021), zero
bubble H1 (Qi et al. 2023); ZB-V and DualPipeV are torch's.

Of torch's schedules only the order of actions is used; it is computed without making stages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from xscale.mesh.torch_private import rank_operations
from xscale.parallel.config import PipelineConfig

ActionTuple = tuple[Literal["F", "B", "I", "W"], int, int]
"""Kind, stage, micro-batch."""


def zbv(pp: int, micros: int) -> list[list[ActionTuple]]:
    """Return the table of ZB-V (Qi et al. 2023, section 6)."""
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    return _table(ScheduleZBVZeroBubble, pp, micros)


def dualpipe_v(pp: int, micros: int) -> list[list[ActionTuple]]:
    """Return the table of DualPipeV; it needs at least 2 * pp micro-batches."""
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV

    return _table(ScheduleDualPipeV, pp, micros)


def _table(schedule: Any, pp: int, micros: int) -> list[list[ActionTuple]]:
    operations = rank_operations(schedule, pp, 2, micros)
    return [[action for operation in rank for action in _flatten(operation)] for rank in operations]


def _flatten(operation: Any) -> list[ActionTuple]:
    """Convert an action of torch; overlapped actions become consecutive ones."""
    if operation is None:
        return []
    if operation.sub_actions is not None:
        return [action for sub_action in operation.sub_actions for action in _flatten(sub_action)]
    return [(operation.computation_type.value, operation.stage_index, operation.microbatch_index)]


ActionKind = Literal["F", "B", "I", "W"]
"""Forward; full backward; backward to the stage's input only; backward to the weights."""


@dataclass(frozen=True, order=True)
class Action:
    """A forward or backward of one micro-batch in one stage."""

    kind: ActionKind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}@{self.stage}"


ActionTable = list[list[Action]]
"""The actions of each rank of pp, in order."""
TableMaker = Callable[[int, int, int], ActionTable]
"""From the ranks of pp, stages per rank, and micro-batches."""


@dataclass(frozen=True)
class PipelineSchedule:
    """A pipeline schedule and the stages it needs."""

    name: str
    make: TableMaker
    interleaved: bool = False
    """Whether a rank has `parallel.pipeline.stages_per_rank` stages; otherwise one, or two if `v_shaped`."""
    v_shaped: bool = False
    """Whether stages are placed as a V: the last one is on the first rank."""
    splits_backward: bool = False
    """Whether backwards are split into I and W."""

    def stages_per_rank(self, config: PipelineConfig) -> int:
        """Return the number of stages of a rank."""
        return config.stages_per_rank if self.interleaved else 2 if self.v_shaped else 1

    def stages(self, config: PipelineConfig, pp: int) -> int:
        """Return the number of stages of all ranks."""
        return pp * self.stages_per_rank(config)

    def rank_of(self, stage: int, pp: int) -> int:
        """Return the rank of the stage."""
        turn, at = divmod(stage, pp)
        return pp - 1 - at if self.v_shaped and turn % 2 else at

    def table(self, config: PipelineConfig, pp: int, micros: int) -> ActionTable:
        """Return the actions of a step of `micros` micro-batches on each rank."""
        return self.make(pp, self.stages_per_rank(config), micros)


def gpipe(pp: int, chunks: int, micros: int) -> ActionTable:
    """Run all forwards, then all backwards."""
    return [
        [Action(kind, rank, micro) for kind in ("F", "B") for micro in range(micros)]
        for rank in range(pp)
    ]


def one_f_one_b(pp: int, chunks: int, micros: int) -> ActionTable:
    """Run 1F1B: a rank saves activations of at most pp - rank micro-batches."""
    return [_steady(pp, 1, micros, rank, min(micros, pp - rank - 1)) for rank in range(pp)]


def interleaved(pp: int, chunks: int, micros: int) -> ActionTable:
    """Run interleaved 1F1B: several stages per rank fill the pipeline sooner; micro-batches go in rounds of pp."""
    total = micros * chunks
    warm = [min(total, 2 * (pp - rank - 1) + (chunks - 1) * pp) for rank in range(pp)]
    return [_steady(pp, chunks, micros, rank, warm[rank]) for rank in range(pp)]


def _steady(pp: int, chunks: int, micros: int, rank: int, warm: int) -> list[Action]:
    def forward(number: int) -> Action:
        chunk, micro = _place(number, pp, chunks)
        return Action("F", chunk * pp + rank, micro)

    def backward(number: int) -> Action:
        chunk, micro = _place(number, pp, chunks)
        return Action("B", (chunks - 1 - chunk) * pp + rank, micro)

    total = micros * chunks
    actions = [forward(number) for number in range(warm)]
    for number in range(total - warm):
        actions += [forward(warm + number), backward(number)]
    return actions + [backward(number) for number in range(total - warm, total)]


def _place(number: int, pp: int, chunks: int) -> tuple[int, int]:
    """Return chunk and micro-batch of a rank's n-th forward: pp micro-batches through each chunk in turn."""
    if chunks == 1:
        return 0, number
    round_, within = divmod(number, pp * chunks)
    return within // pp, round_ * pp + within % pp


def zero_bubble(pp: int, chunks: int, micros: int) -> ActionTable:
    """Run 1F1B with split backwards: later ranks delay W longer, into what would be bubble."""
    table = []
    for rank in range(pp):
        actions: list[Action] = []
        for action in _steady(pp, 1, micros, rank, min(micros, pp - rank - 1)):
            if action.kind == "F":
                actions.append(action)
                continue
            actions.append(Action("I", rank, action.micro))
            if action.micro >= rank:
                actions.append(Action("W", rank, action.micro - rank))
        actions += [Action("W", rank, micro) for micro in range(max(0, micros - rank), micros)]
        table.append(actions)
    return table


def _torch(make: Callable[[int, int], list[list[tuple[ActionKind, int, int]]]]) -> TableMaker:
    return lambda pp, chunks, micros: [
        [Action(*action) for action in actions] for actions in make(pp, micros)
    ]


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        PipelineSchedule("gpipe", gpipe),
        PipelineSchedule("1f1b", one_f_one_b),
        PipelineSchedule("interleaved_1f1b", interleaved, interleaved=True),
        PipelineSchedule("zero_bubble", zero_bubble, splits_backward=True),
        PipelineSchedule("zbv", _torch(zbv), v_shaped=True, splits_backward=True),
        PipelineSchedule("dualpipe_v", _torch(dualpipe_v), v_shaped=True, splits_backward=True),
    )
}


def schedule_of(config: PipelineConfig) -> PipelineSchedule:
    """Return the schedule that the config names."""
    return SCHEDULES[config.schedule]
