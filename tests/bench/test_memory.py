"""Measured beside predicted memory, and the trace of step times through saves."""

from pathlib import Path

import pytest

from tests.train.tiny import recipe
from xscale.bench.checkpoint_trace import show_trace, trace_of, trace_steps
from xscale.bench.memory import MemoryComparison, compare_memory, show
from xscale.core.errors import ConfigError
from xscale.data.corpus.prepare import prepare


@pytest.mark.long
def test_the_prediction_stands_beside_the_measurement(tmp_path: Path) -> None:
    settings = recipe(tmp_path, data={"sequence_length": 64})
    prepare(settings.data)
    comparison = compare_memory(settings)
    # Tensors of a few megabytes: the batches, which a plan leaves out, are a part of them.
    assert 0.3 < comparison.ratio < 2.0
    assert comparison.reserved is None
    assert comparison.predicted_total >= comparison.predicted


def test_the_spread_of_the_ratios_is_printed() -> None:
    rows = [("a", MemoryComparison(9e9, 10e9, None, None, 9e9)), ("b", MemoryComparison(11e9, 10e9, None, None, 12e9))]
    text = show(rows)
    assert "9.00 GB" in text
    assert text.splitlines()[-1] == "predicted / measured: min 0.900, median 1.100, max 1.100; 1 of 2 below 1.0"


def test_the_trace_tells_steps_before_a_save_from_those_beside_it() -> None:
    """Steps of one second; a save after the sixth, beside which the seventh takes three."""
    seconds = [9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    ends = [sum(seconds[: number + 1]) for number in range(len(seconds))]
    trace = trace_of(ends, every=6)
    assert trace.before_save == (1.0, 1.0)
    assert trace.through_saves == (3.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert (trace.median, trace.longest_ratio) == (1.0, 3.0)
    assert trace.overhead == pytest.approx(1 / 3)
    assert "p50 1.000 s, max 3.000 s (3.00x of the p50 without one), +33.3% on average" in show_trace(trace, 6)


@pytest.mark.slow
def test_a_run_is_traced_through_its_saves(tmp_path: Path) -> None:
    trace = trace_steps(recipe(tmp_path), 12, 6)
    assert len(trace.through_saves) == 6
    assert len(trace.before_save) == 2
    assert all(seconds > 0 for seconds in trace.seconds)
    with pytest.raises(ConfigError, match="do not show steps before and after one"):
        trace_steps(recipe(tmp_path), 6, 6)
