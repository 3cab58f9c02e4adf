"""Conformance of schedules: a warm-up, a share of the peak rate, and the last step known only where it says."""

from typing import Any

import pytest

from tests.conformance.checked import each_case
from xscale.conformance import schedule as suite
from xscale.conformance.check import Arguments, Check
from xscale.core.registry import Entry, Family
from xscale.optim.schedule import Schedule, ScheduleTraits


@each_case(suite)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)


class Flat(Schedule):
    """Always the peak."""

    def after_warmup(self, step: int) -> float:
        return 1.0


class Jumps(Flat):
    def after_warmup(self, step: int) -> float:
        return 1.0 if step < 900 else 0.1


class Above(Flat):
    def after_warmup(self, step: int) -> float:
        return 1.5


class Counts(Flat):
    calls = 0

    def after_warmup(self, step: int) -> float:
        self.calls += 1
        return 1 / self.calls


class Cold(Flat):
    def factor(self, step: int) -> float:
        return 1.0


def registered(part: type[Schedule], *, bounded: bool = False) -> Entry[Any]:
    family: Family[ScheduleTraits] = Family("schedule", ScheduleTraits)
    family.register("cheat", traits=ScheduleTraits(bounded=bounded))(type("Cheat", (part,), {}))
    return family.get("cheat")


def test_cheats_are_caught() -> None:
    checks = {
        suite.it_is_a_share_of_the_peak: registered(Above),
        suite.it_warms_up_linearly: registered(Cold),
        suite.it_does_not_jump: registered(Jumps),
        suite.it_knows_the_last_step_only_where_declared: registered(Flat, bounded=True),
        suite.it_is_a_function_of_the_step: registered(Counts),
    }
    for check, cheat in checks.items():
        check(registered(Flat))
        with pytest.raises(AssertionError):
            check(cheat)
