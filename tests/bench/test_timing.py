"""The timing harness: alternating rounds, discarded warm-up, and ratios within rounds."""

from collections.abc import Callable

import pytest

from xscale.bench.harness import timing
from xscale.bench.harness.timing import Sample, Timings, alternate, host_clock


def recorded(order: list[str]) -> Callable[[str], Sample]:
    def clock(side: str) -> Sample:
        order.append(side)
        return Sample(float(len(order)))

    return clock


def test_sides_alternate_after_warm_up() -> None:
    order: list[str] = []
    timings = alternate({"a": "a", "b": "b"}, recorded(order), rounds=2, warmup=1)
    assert order == ["a", "b"] * 3
    assert timings.values("a") == [3.0, 5.0]
    assert timings.values("b") == [4.0, 6.0]


def test_swap_reverses_every_other_round() -> None:
    order: list[str] = []
    alternate({"a": "a", "b": "b"}, recorded(order), rounds=3, warmup=1, swap=True)
    assert "".join(order) == "ba" + "ab" + "ba" + "ab"


def test_the_budget_ends_it_after_the_least_number_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(1000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(seconds)))
    few = alternate({"a": "a"}, recorded([]), rounds=50, budget_seconds=0.0, minimum_rounds=5)
    assert len(few.samples["a"]) == 5
    some = alternate({"a": "a"}, recorded([]), rounds=50, budget_seconds=10.0)
    assert 5 < len(some.samples["a"]) < 15


def test_ratios_and_differences_are_taken_within_rounds() -> None:
    timings = Timings({"a": [Sample(1.0), Sample(2.0), Sample(9.0)], "b": [Sample(2.0), Sample(4.0), Sample(9.0)]})
    assert timings.ratio("a", "b") == 0.5
    assert timings.difference("b", "a") == 1.0
    assert timings.median("a") == 2.0
    assert timings.fastest("b") == 2.0


def test_the_host_clock_waits_for_the_device_and_returns_the_result() -> None:
    waited: list[bool] = []
    sample = host_clock(lambda: waited.append(True))(lambda: "result")
    assert sample.result == "result"
    assert waited == [True]
    assert sample.seconds > 0
