"""TensorBoard reads back what the observer wrote."""

import pytest

from xscale.observe import EndReport, EvalReport, SampleReport
from xscale.observe.trackers.tensorboard import TensorBoard


def _read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def _watch(folder, facts, reports):
    board = TensorBoard(folder)
    board.start(facts)
    for report in reports:
        (board.evaluated if isinstance(report, EvalReport) else board.step)(report)
    board.sampled(SampleReport(40, "def ", "f():"))
    board.finish(EndReport(40, "done"))


def test_scalars_of_steps_evaluations_and_experts(tmp_path, facts, run):
    _watch(tmp_path, facts(), run())
    events = _read(tmp_path)
    losses = events.Scalars("train/loss")
    assert [event.step for event in losses] == list(range(1, 41))
    assert losses[-1].value == pytest.approx(2.1098938, rel=1e-6)
    assert [event.step for event in events.Scalars("eval/bits_per_byte")] == [10, 20, 30, 40]
    assert events.Scalars("stack.blocks.1.ffn.part/load_greatest")[0].value == pytest.approx(1.6)
    assert events.Scalars("stack.blocks.1.ffn.part/load_least")[0].value == pytest.approx(0.4)
    assert b"def f():" in events.Tensors("sample/text_summary")[0].tensor_proto.string_val[0]


def test_no_step_stands_twice_after_resuming(tmp_path, facts, run):
    _watch(tmp_path, facts(), run(1, 27))
    _watch(tmp_path, facts(resumed_from=20, first_step=21), run(21, 40))
    steps = [event.step for event in _read(tmp_path).Scalars("train/loss")]
    assert steps == list(range(1, 41))


def test_what_is_logged_can_be_seen_while_the_run_runs(tmp_path, facts, step):
    board = TensorBoard(tmp_path)
    board.start(facts())
    board.step(step(1))
    assert len(_read(tmp_path).Scalars("train/loss")) == 1


def test_what_is_not_finite_is_a_gap(tmp_path, facts, step):
    _watch(tmp_path, facts(), [step(1, loss=float("nan"), statistics={"a/load": [0.0, 0.0]}), step(2)])
    events = _read(tmp_path)
    assert [event.step for event in events.Scalars("train/loss")] == [2]
    assert "a/load_least" not in events.Tags()["scalars"]


def test_a_full_disk_loses_no_record(tmp_path, facts, step, limited_files):
    board = TensorBoard(tmp_path)
    with limited_files(0):
        board.start(facts())
        board.step(step(1))
    board.step(step(2))
    with limited_files(300):
        for number in range(3, 30):
            board.step(step(number))
        assert board.backlog.missing
    board.finish(EndReport(30, "done"))
    assert board.backlog.missing == 0
    assert [event.step for event in _read(tmp_path).Scalars("train/loss")] == list(range(1, 30))
