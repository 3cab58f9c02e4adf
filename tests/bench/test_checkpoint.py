"""The benchmark of saves: plausible times, and no files left behind."""

from pathlib import Path

from xscale.bench.checkpoint import FirstPlan, Stall, first_plan, show, show_plan, stall


def test_stall(tmp_path: Path) -> None:
    measured = stall(tmp_path, megabytes=16, repeats=3, work_seconds=0.1)
    assert measured.size == 16 << 20
    # How long each takes is the benchmark's to say: a busy machine decides it.
    times = (measured.synchronous, measured.unhashed, measured.hashing, measured.at_once, measured.background)
    assert all(seconds > 0 for seconds in times), measured
    assert not list(tmp_path.iterdir())


def test_the_table() -> None:
    times = {"synchronous": 2.0, "unhashed": 1.9, "added": 0.05, "hashing": 0.07, "at_once": 0.1, "background": 0.001}
    text = show(Stall(size=1 << 28, repeats=9, **times))
    assert "256.0 MiB of state" in text
    assert "2.5% of it" in text
    assert "20x less" in text
    assert "2000x less" in text


def test_a_first_plan_has_every_box() -> None:
    plan = first_plan(boxes=90, repeats=2)
    assert (plan.boxes, plan.ranks) == (90, 3)
    assert min(plan.gather, plan.plan, plan.scatter) > 0


def test_the_table_of_a_first_plan() -> None:
    text = show_plan(FirstPlan(boxes=30_000, ranks=1_000, gather=0.25, plan=1.0, scatter=0.75))
    assert "30,000 boxes of 1,000 ranks" in text
    assert "2000.0 ms  of at most 5 s" in text
    assert "of at most" not in show_plan(FirstPlan(boxes=90, ranks=3, gather=0.25, plan=1.0, scatter=0.75))
