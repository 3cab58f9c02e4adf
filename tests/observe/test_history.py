"""The columns that the page draws, against sums done here."""

import json
import math

import pytest

from xscale.observe import EvalReport
from xscale.observe.metrics import Metrics
from xscale.observe.record import COLUMNS, load_history, value_at


def _write(folder, facts, reports, every=1):
    metrics = Metrics(folder, every)
    metrics.start(facts)
    for report in reports:
        (metrics.evaluated if isinstance(report, EvalReport) else metrics.step)(report)


def test_every_logged_step_is_there(tmp_path, facts, run):
    _write(tmp_path, facts(), run())
    history = load_history(tmp_path)
    assert list(history.steps) == list(range(1, 41))
    assert history.scalars["loss"][39] == 2.0 + 6.0 * math.exp(-4)
    assert [item["tokens"] for item in history.evaluations] == [40960, 81920, 122880, 163840]
    assert history.split["backward"] == pytest.approx(0.3)


def test_a_folder_without_metrics_is_an_empty_history(tmp_path):
    history = load_history(tmp_path)
    assert len(history.steps) == 0
    assert value_at(history.steps, history.scalars["tokens"], 5) == 0


def test_the_first_steps_are_no_part_of_the_split(tmp_path, facts, step):
    slow = {"data": 0.0, "forward": 100.0}
    fast = {"data": 0.1, "forward": 1.0}
    _write(tmp_path, facts(), [step(n, split=slow if n <= 5 else fast) for n in range(1, 41)])
    assert load_history(tmp_path).split == pytest.approx(fast)


def test_many_steps_become_columns_of_means(tmp_path, facts, step):
    count = 3 * COLUMNS
    loads = [[n / count, 1 - n / count] for n in range(1, count + 1)]
    name = "blocks.1.ffn"
    _write(
        tmp_path,
        facts(last_step=count),
        [
            step(n + 1, statistics={f"{name}/load": load, f"{name}/dropped": float(n)} if n >= 6 else {})
            for n, load in enumerate(loads)
        ],
    )
    history = load_history(tmp_path)
    assert len(history.ends) == len(history.loads[name]) == COLUMNS
    assert all(math.isnan(share) for column in history.loads[name][:2] for share in column)
    assert history.loads[name][2] == pytest.approx([8 / count, 1 - 8 / count])
    assert history.statistics["dropped"][name][-1] == count - 2
    assert history.ends[-1] == 4096 * count


def test_null_is_nan_and_no_part_of_a_mean(tmp_path):
    lines = [
        {"step": 1, "loss": None, "tokens": 1, "a/load": [None, 1.0], "a/x": 1.0},
        {"step": 2, "loss": 2.0, "tokens": 2, "a/load": [0.5, 0.5], "a/x": None},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = load_history(tmp_path)
    assert math.isnan(history.scalars["loss"][0])
    assert math.isnan(history.loads["a"][0][0])
    assert history.loads["a"][0][1] == 1.0
    assert history.statistics["x"]["a"][0] == 1.0


def test_tokens_between_logged_steps_are_in_proportion(tmp_path, facts, run):
    _write(tmp_path, facts(), run(), every=15)
    history = load_history(tmp_path)
    assert value_at(history.steps, history.scalars["tokens"], 0) == 0
    assert value_at(history.steps, history.scalars["tokens"], 20) == pytest.approx(4096 * 20)
    assert value_at(history.steps, history.scalars["tokens"], 99) == 4096 * 40
