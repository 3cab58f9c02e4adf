"""The tables of torch.distributed.pipelining's V schedules: ZB-V (Qi et al. 2023) and DualPipeV (DeepSeek 2024).

Only the order of actions is torch's; it is worked out for stages that need not exist.
"""

from types import SimpleNamespace
from typing import Any, Literal

Named = tuple[Literal["F", "B", "I", "W"], int, int]
"""Kind, stage, micro-batch."""


def zbv(pp: int, micros: int) -> list[list[Named]]:
    """Qi et al. 2023, section 6."""
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    return _table(ScheduleZBVZeroBubble, pp, micros)


def dualpipe_v(pp: int, micros: int) -> list[list[Named]]:
    """At least 2 * pp micro-batches."""
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV

    return _table(ScheduleDualPipeV, pp, micros)


def _table(schedule: Any, pp: int, micros: int) -> list[list[Named]]:
    asking = SimpleNamespace(pp_group_size=pp, num_stages=2 * pp, n_local_stages=2, _n_microbatches=micros)
    return [
        [named for action in schedule._calculate_single_rank_operations(asking, rank) for named in _named(action)]
        for rank in range(pp)
    ]


def _named(action: Any) -> list[Named]:
    """An action of torch; those that it would run side by side come one after the other."""
    if action is None:
        return []
    if action.sub_actions is not None:
        return [named for one in action.sub_actions for named in _named(one)]
    return [(action.computation_type.value, action.stage_index, action.microbatch_index)]
