"""Work between steps asks whether to stop: its parts by themselves; tests/train/test_stop_between_steps.py has runs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from xscale.observe.metrics import Cut, truncate
from xscale.run.run_folder import INTERRUPTED, is_interrupted, mark_end
from xscale.run.state import State
from xscale.train.interruptible_work import InterruptibleWork, Work
from xscale.watchdog.distributed_stop import DistributedStop, StopRequested
from xscale.watchdog.watchdog import StopSignal

CPU = torch.device("cpu")


def stops() -> tuple[StopSignal, DistributedStop]:
    signal = StopSignal()
    return signal, DistributedStop(signal, CPU)


def test_batches_end_at_the_first_or_second_after_a_signal() -> None:
    signal, stop = stops()
    taken: list[int] = []

    def work() -> None:
        for batch in stop.batches(range(9)):
            taken.append(batch)
            signal.cause = "SIGUSR1" if batch == 3 else signal.cause

    with pytest.raises(StopRequested, match="SIGUSR1"):
        work()
    assert taken == [0, 1, 2, 3, 4]
    assert stop.cause == "SIGUSR1"


def test_without_a_signal_all_batches_come() -> None:
    assert list(stops()[1].batches(range(3))) == [0, 1, 2]


def test_a_signal_in_the_last_batch_keeps_what_is_complete() -> None:
    signal, stop = stops()
    for batch in stop.batches(range(3)):
        signal.cause = "SIGTERM" if batch == 2 else None
    assert stop.cause is None
    with pytest.raises(StopRequested):
        stop.check()


def test_handlers_of_errors_do_not_keep_it() -> None:
    signal, stop = stops()
    signal.cause = "SIGTERM"

    def library() -> None:
        try:
            stop.check()
        except Exception:
            pytest.fail("a library kept the request to stop")

    with pytest.raises(StopRequested):
        library()


@pytest.mark.parametrize(
    ("count", "own", "cause"), [(0, "SIGTERM", None), (1, "SIGTERM", "SIGTERM"), (1, None, "a signal to another rank")]
)
def test_the_answer_is_that_of_all_ranks(count: float, own: str | None, cause: str | None) -> None:
    """A signal that came after this rank gave its flag counts in the next question."""
    signal, stop = stops()
    signal.cause = own
    stop.agree(count)
    assert stop.cause == cause


class Recorder:
    """Two kinds of work, each of three batches, and one at the end."""

    def __init__(self, pending: list[str], signal_in: str = "", at: int = 1) -> None:
        self.signal, self.stop = stops()
        self.state, self.done, self.asked = State(pending=pending), list[str](), list[str]()
        self.signal_in, self.at = signal_in, at
        works = {name: Work(lambda: True, self.work(name)) for name in ("first", "second")}
        works["last"] = Work(lambda: True, self.work("last"), at_end=True)
        self.works = InterruptibleWork(works, self.state, self.stop, nn.Identity())

    def work(self, name: str) -> Callable[[], None]:
        def do() -> None:
            for batch in range(3):
                self.stop.check()
                self.asked.append(name)
                if name == self.signal_in and batch == self.at:
                    self.signal.cause = "SIGTERM"
            self.done.append(name)

        return do


CUT: dict[str, tuple[str, int, list[str], list[str]]] = {
    "none": ("", 0, ["first", "second"], []),
    "in the first batch of the first": ("first", 0, [], ["first", "second"]),
    "in the second batch of the second": ("second", 1, ["first"], ["second"]),
    "in the last batch of the first": ("first", 2, ["first"], ["second"]),
    "in the last batch of all": ("second", 2, ["first", "second"], []),
}
"""Signal -> the work and batch in which it comes, what is done, what is repeated."""


@pytest.mark.parametrize("case", CUT)
def test_what_is_cut_short_is_pending(case: str) -> None:
    where, at, done, pending = CUT[case]
    recorder = Recorder([], where, at)
    recorder.works.find_due()
    recorder.works.do()
    assert (recorder.done, recorder.state.pending) == (done, pending)
    resumed = Recorder(list(pending))
    resumed.works.do()
    assert (resumed.done, resumed.state.pending) == (pending, [])


def test_with_a_signal_nothing_is_begun() -> None:
    recorder = Recorder([])
    recorder.stop.agree(1)
    recorder.works.find_due()
    recorder.works.do()
    assert (recorder.asked, recorder.state.pending) == ([], ["first", "second"])
    recorder.works.find_due_at_end()
    recorder.works.do()
    assert (recorder.asked, recorder.state.pending) == ([], ["first", "second", "last"])


def test_work_that_the_config_no_longer_has_is_forgotten() -> None:
    recorder = Recorder(["removed", "second"])
    recorder.works.do()
    assert (recorder.done, recorder.state.pending) == (["second"], [])


class Counters:
    """An optimizer with a counter."""

    def counters(self) -> dict[str, int]:
        return {"steps": 3}

    def set_counters(self, counters: dict[str, int]) -> None: ...


def test_a_checkpoint_of_an_earlier_version_has_nothing_pending() -> None:
    data = State(step=2).encode(Counters())
    assert data.pop("pending") == []
    State.check(data, ["steps"])
    assert State.decode(data, Counters(), 8).pending == []


@pytest.mark.parametrize("pending", [None, "evaluation", [1], {"evaluation": 1}])
def test_pending_work_that_no_run_writes_is_refused(pending: object) -> None:
    data = State(step=2).encode(Counters()) | {"pending": pending}
    with pytest.raises(ValueError, match="pending is"):
        State.check(data, ["steps"])


ROWS = (
    '{"step": 1, "loss": 1}',
    '{"step": 2, "loss": 1}',
    '{"step": 2, "eval_loss": 1}',
    '{"step": 2, "tasks_seconds": 1}',
    '{"step": 3, "loss": 1}',
)


@pytest.mark.parametrize(
    ("repeated", "kept"), [([], [0, 1, 2, 3]), (["eval_loss"], [0, 1, 3]), (["eval_loss", "tasks_seconds"], [0, 1])]
)
def test_rows_that_are_repeated_are_removed(tmp_path: Path, repeated: list[str], kept: list[int]) -> None:
    """A life that was killed after it had repeated an evaluation has logged it already."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{row}\n" for row in ROWS))
    truncate(path, Cut(2, tuple(repeated)))
    assert path.read_text().splitlines() == [ROWS[number] for number in kept]


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A file beside the run folder, which nothing may change."""
    path = tmp_path / "outside"
    path.write_text("mine")
    yield path
    assert path.read_text() == "mine"


@pytest.mark.parametrize("kind", ["nothing", "a file", "a link", "a folder"])
def test_the_mark_of_an_end_that_was_cut_short(tmp_path: Path, outside: Path, kind: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    if kind == "a file":
        (run / INTERRUPTED).touch()
    elif kind == "a link":
        (run / INTERRUPTED).symlink_to(outside)
    elif kind == "a folder":
        (run / INTERRUPTED).mkdir()
    assert is_interrupted(run) == (kind in ("a file", "a link"))
    if kind != "a folder":
        mark_end(run, interrupted=True)
        assert is_interrupted(run)
    mark_end(run, interrupted=False)
    assert not is_interrupted(run)
