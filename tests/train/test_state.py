"""The trainer state: what a checkpoint stores is read back, also under the names of an older version."""

import pytest

from xscale.run.state import State


class Optimizer:
    """Counters, and nothing else."""

    def __init__(self) -> None:
        self.stored = {"step": 7}

    def counters(self) -> dict[str, int]:
        return self.stored

    def set_counters(self, counters: dict[str, int]) -> None:
        self.stored = counters


def test_a_state_is_read_back() -> None:
    state = State(step=7, consumed=56, skipped_samples=[[8, 16]], losses=[2.0], sequence_length=32)
    other = Optimizer()
    other.stored = {}
    assert State.decode(state.encode(Optimizer()), other, 32) == state
    assert other.stored == {"step": 7}


def test_old_names_are_read() -> None:
    data = State(consumed=56, skipped_samples=[[8, 16]], sequence_length=32).encode(Optimizer())
    data["left_out"] = data.pop("skipped_samples")
    assert State.decode(data, Optimizer(), 32).skipped_samples == [[8, 16]]


def test_one_field_under_two_names_is_refused() -> None:
    """Which of the two counts would be a matter of their order in the file."""
    data = State(sequence_length=32).encode(Optimizer())
    State.check(data, {"step"})
    with pytest.raises(ValueError, match="other fields: one twice"):
        State.check(data | {"left_out": [[8, 16]]}, {"step"})


def test_samples_of_another_length_are_converted() -> None:
    data = State(consumed=10, skipped_samples=[[4, 6]], sequence_length=32).encode(Optimizer())
    state = State.decode(data, Optimizer(), 64)
    assert (state.consumed, state.skipped_samples, state.sequence_length) == (5, [[2, 3]], 64)
