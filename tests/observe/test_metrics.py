"""metrics.jsonl holds every logged step once, in full precision, over restarts and torn lines."""

import json
import math
from pathlib import Path

import pytest

from tests.bounds import bounded
from xscale.observe import EvalReport
from xscale.observe.metrics import Cut, Metrics, read, truncate


def _watch(metrics, facts, reports):
    metrics.start(facts)
    for report in reports:
        (metrics.evaluated if isinstance(report, EvalReport) else metrics.step)(report)


def _objects(folder: Path):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_object_a_step_and_one_an_evaluation(tmp_path, facts, run):
    _watch(Metrics(tmp_path), facts(), run())
    objects = _objects(tmp_path)
    steps = [item for item in objects if "loss" in item]
    assert [item["step"] for item in steps] == list(range(1, 41))
    assert steps[0].keys() >= {"step", "loss", "lr", "grad_norm", "tokens", "seconds", "tokens_per_second", "mfu"}
    assert steps[0]["split/backward"] == 0.3
    assert steps[0]["stack.blocks.1.ffn.part/load"] == [0.4, 0.3, 0.2, 0.1]
    evaluations = [item for item in objects if "eval_loss" in item]
    assert [item["step"] for item in evaluations] == [10, 20, 30, 40]
    assert evaluations[0].keys() >= {"step", "eval_loss", "perplexity", "bits_per_byte"}
    assert "loss" not in evaluations[0]


def test_numbers_come_back_bit_by_bit(tmp_path, facts, step):
    loss, lr = 0.1 + 0.2, math.nextafter(1e-3, 1)
    _watch(Metrics(tmp_path), facts(), [step(1, loss=loss, lr=lr)])
    (item,) = _objects(tmp_path)
    assert item["loss"] == loss
    assert item["lr"] == lr
    assert repr(loss) in (tmp_path / "metrics.jsonl").read_text()


def test_every_line_is_there_before_the_next_step(tmp_path, facts, step):
    metrics = Metrics(tmp_path)
    metrics.start(facts())
    for number in (1, 2, 3):
        metrics.step(step(number))
        assert len(_objects(tmp_path)) == number


def test_what_is_not_finite_is_null_for_readers_of_strict_json(tmp_path, facts, step):
    statistics = {"a/load": [0.5, math.nan]}
    _watch(Metrics(tmp_path), facts(), [step(1, loss=math.nan, grad_norm=math.inf, statistics=statistics)])

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    item = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert item["loss"] is None
    assert item["grad_norm"] is None
    assert item["a/load"] == [0.5, None]


def test_every_steps_keeps_the_first_and_the_last(tmp_path, facts, run):
    _watch(Metrics(tmp_path, every_steps=15), facts(), run())
    assert [item["step"] for item in _objects(tmp_path) if "loss" in item] == [1, 15, 30, 40]


def test_a_resumed_run_writes_the_file_of_one_that_was_not_stopped(tmp_path, facts, run):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    _watch(Metrics(whole, 4), facts(folder=whole), run())
    _watch(Metrics(parts, 4), facts(folder=parts), run(1, 27))
    # The process died without a word after step 27; the newest checkpoint is of step 20.
    with open(parts / "metrics.jsonl", "a") as file:
        file.write('{"step": 28, "lo')
    _watch(Metrics(parts, 4), facts(folder=parts, resumed_from=20, first_step=21), run(21, 40))
    assert (parts / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert not list(parts.glob("*.part"))


def test_without_the_cut_steps_would_stand_twice(tmp_path, facts, run, monkeypatch):
    monkeypatch.setattr("xscale.observe.metrics.truncate", lambda path, step: None)
    _watch(Metrics(tmp_path), facts(), run(1, 27))
    _watch(Metrics(tmp_path), facts(resumed_from=20, first_step=21), run(21, 40))
    steps = [item["step"] for item in _objects(tmp_path) if "loss" in item]
    assert len(steps) > len(set(steps))


def test_a_run_that_begins_again_begins_the_file_again(tmp_path, facts, run):
    _watch(Metrics(tmp_path), facts(), run(1, 5))
    _watch(Metrics(tmp_path), facts(), run(1, 3))
    assert [item["step"] for item in _objects(tmp_path)] == [1, 2, 3]


def test_a_cut_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    before = '{"step": 1, "loss": 1.0}\n{"step": 2, "lo\n{"step": 1, "eval_loss": 1.0}\n'
    path.write_text(before)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        truncate(path, Cut(1))
    assert path.read_text() == before


def test_a_statistic_cannot_take_the_place_of_a_column(tmp_path, facts, step):
    with pytest.raises(AssertionError, match="statistic"):
        _watch(Metrics(tmp_path), facts(), [step(1, statistics={"loss": 0.0})])


def test_reading_passes_over_torn_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "x\n[3]\n\xff\xfe\n{"step": 4}')
    assert [item["step"] for item in read(path)] == [1, 4]


@pytest.mark.parametrize("place", ["first", "last", "between"])
def test_a_line_without_an_end_takes_no_memory(tmp_path, monkeypatch, place):
    """A file of somebody else, or sparse after a crash. It is no row: readers leave it out, and a cut removes it."""
    monkeypatch.setattr("xscale.observe.metrics.LINE_BYTES", 1 << 20)
    path = tmp_path / "metrics.jsonl"
    rows = [b'{"step": 1, "loss": 2.0}\n', b'{"step": 2, "loss": 1.0}\n']
    at = {"first": 0, "last": 2, "between": 1}[place]
    with path.open("wb") as file:
        for row in rows[:at]:
            file.write(row)
        file.seek(200 << 20, 1)
        file.write(b"\n")
        for row in rows[at:]:
            file.write(row)
    with bounded(64 << 20):
        assert [item["step"] for item in read(path)] == [1, 2]
        truncate(path, Cut(2))
    assert path.read_bytes() == b"".join(rows)


@pytest.mark.parametrize("size", [31, 32, 33, 63, 64, 65])
def test_lines_around_the_longest_are_whole_or_left_out(tmp_path, monkeypatch, size):
    monkeypatch.setattr("xscale.observe.metrics.LINE_BYTES", 32)
    path = tmp_path / "metrics.jsonl"
    line = b'{"step": 1, "loss": 2.0' + b" " * (size - 25) + b"}\n"
    assert len(line) == size
    path.write_bytes(line + b'{"step": 2, "loss": 1.0}\n')
    assert [item["step"] for item in read(path)] == ([1, 2] if size <= 32 else [2])
