"""Requirements of the training loop: the batch, the schedule, what is observed and evaluated."""

from collections.abc import Iterator

from torch import nn

from xscale.core.errors import Problem
from xscale.core.registry import Entry
from xscale.core.requirements import divisors_of, reads, take
from xscale.mesh.axes import Degrees
from xscale.objective.objective import ObjectiveTraits
from xscale.observe.config import ObserveConfig, check_profile
from xscale.observe.config import check as check_observers
from xscale.optim.schedule import SCHEDULES, Schedule
from xscale.parallel.config import ParallelConfig
from xscale.parallel.pipeline.check import check_micro_batches
from xscale.settings.scored_text import check_tasks
from xscale.settings.settings import Settings, TrainConfig


def schedule_fits_the_steps(schedule: Schedule.Config, train: TrainConfig) -> list[Problem]:
    """The schedule's phases are phases of the run."""
    problems: list[Problem] = SCHEDULES.of(schedule).part.check(schedule, train.steps, "schedule")
    return problems


def observers_can_run(observe: ObserveConfig) -> list[Problem]:
    """Each observer has what it writes to."""
    return check_observers(observe)


def profiled_steps_are_run(observe: ObserveConfig, train: TrainConfig) -> list[Problem]:
    """The profiled steps are steps of the run."""
    return check_profile(observe.profile, train.steps)


@reads("train", "model", "objective")
def tasks_can_be_evaluated(
    settings: Settings,
    built_model: nn.Module,
    objective_entry: Entry[ObjectiveTraits],
    train: TrainConfig,
) -> list[Problem]:
    """The model scores text where tasks of lm_eval are evaluated."""
    return check_tasks(settings, built_model)


def micro_batches_divide_the_batch(train: TrainConfig, degrees: Degrees) -> Iterator[Problem]:
    """Each rank has a whole number of micro-batches in a step (gradient accumulation)."""
    batch, micro, dp = train.batch_size, train.micro_batch_size, degrees.dp
    if batch % (micro * dp) == 0:
        return
    what = f"micro_batch_size={micro} x dp={dp} does not divide batch_size={batch}"
    sizes = divisors_of(batch // dp) if batch % dp == 0 else []
    choices = tuple(choice for size in sizes for choice in take(size, key="train.micro_batch_size"))
    yield Problem(
        "train.batch_size", what, choices=choices or take(_next_multiple(batch, micro * dp))
    )


def _next_multiple(number: int, factor: int) -> int:
    return -(-number // factor) * factor


def schedule_has_its_micro_batches(
    parallel: ParallelConfig,
    train: TrainConfig,
    degrees: Degrees,
    micro_batches_divide_the_batch: tuple[Problem, ...],
) -> list[Problem]:
    """The pipeline's schedule can run as many micro-batches as a step has."""
    if micro_batches_divide_the_batch:
        return []
    return check_micro_batches(
        parallel, train.batch_size // (train.micro_batch_size * degrees.dp), "parallel"
    )


OF_THE_RUN = (
    schedule_fits_the_steps,
    observers_can_run,
    profiled_steps_are_run,
)
OF_THE_BATCH = (micro_batches_divide_the_batch, schedule_has_its_micro_batches)
