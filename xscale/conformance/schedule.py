"""Conformance of schedules: a warm-up, a share of the peak rate, and the last step known only where it says."""

import math
from typing import Any

from xscale.conformance.check import check
from xscale.conformance.small_parts import example
from xscale.core.registry import Entry
from xscale.optim.schedule import Schedule

STEPS = 5000


def built(entry: Entry[Any], steps: int = STEPS, **changes: Any) -> Schedule:
    config = example(entry).model_copy(update=changes)
    assert entry.part.check(config, steps, "schedule") == []
    part: Schedule = entry.part(config, steps)
    return part


@check("schedule", at_start=True)
def it_is_a_share_of_the_peak(entry: Entry[Any]) -> None:
    schedule = built(entry)
    factors = [schedule.factor(step) for step in range(1, STEPS + 1)]
    assert all(math.isfinite(factor) and 0 <= factor <= 1 for factor in factors)
    assert abs(max(factors) - 1) <= 0.02, "the peak is never reached"
    assert all(type(factor) is float for factor in factors)


@check("schedule")
def it_warms_up_linearly(entry: Entry[Any]) -> None:
    schedule = built(entry, warmup_steps=50)
    assert all(abs(schedule.factor(step) - step / 50) <= 0.02 for step in range(1, 51))
    assert abs(built(entry, warmup_steps=0).factor(1) - 1) <= 0.02


@check("schedule")
def it_does_not_jump(entry: Entry[Any]) -> None:
    schedule = built(entry)
    jumps = [abs(schedule.factor(step + 1) - schedule.factor(step)) for step in range(1, STEPS)]
    assert max(jumps) < 0.05


@check("schedule")
def it_knows_the_last_step_only_where_declared(entry: Entry[Any]) -> None:
    short, long = built(entry), built(entry, 2 * STEPS)
    same = all(short.factor(step) == long.factor(step) for step in range(1, STEPS + 1, 7))
    assert same != entry.traits.bounded
    if entry.traits.bounded:
        assert short.factor(STEPS) < 0.5, "it knows the last step and does not come down for it"
    assert math.isfinite(short.factor(3 * STEPS)), (
        "a run that was made longer asks beyond the last step"
    )


@check("schedule")
def it_is_a_function_of_the_step(entry: Entry[Any]) -> None:
    schedule = built(entry)
    forwards = [schedule.factor(step) for step in range(1, 200)]
    assert forwards == [schedule.factor(step) for step in range(199, 0, -1)][::-1]
