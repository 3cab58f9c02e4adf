"""TensorBoard reads back what the observer wrote."""

import pytest

from xscale.train.observe import EndReport, EvalReport, SampleReport
from xscale.train.observe.tensorboard import TensorBoard


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
