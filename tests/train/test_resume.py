"""Stopped and gone on is bitwise the run that was not stopped: losses and weights, noise and data order included."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.train.tiny import losses, metrics, recipe, run
from xscale.checkpoint.load import load_tensors, read_state
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from xscale.parallel.shard import sharded
from xscale.run.state import State
from xscale.step.batches import MicroBatches


def one_rank(folder: Path, name: str, **sections: Any) -> int:
    return run(recipe(folder, name, **sections))


def without_drawing(folder: Path, name: str) -> int:
    """A run that may draw no initial weights, since it reads them from its checkpoint."""
    before = sharded.draw

    def refuse(*_: Any) -> Any:
        raise AssertionError("weights were drawn")

    sharded.draw = refuse
    try:
        return run(recipe(folder, name))
    finally:
        sharded.draw = before


def stopped_by_signal(folder: Path, name: str, at: int) -> int:
    """A run that sends itself SIGTERM once step `at` is logged."""
    from xscale.train.after_step.step_reporter import StepReporter

    before = StepReporter.report

    def count(self: StepReporter, *stepped: Any) -> None:
        before(self, *stepped)
        if self.state.step == at:
            os.kill(os.getpid(), signal.SIGTERM)

    StepReporter.report = count  # type: ignore[method-assign]
    try:
        return run(recipe(folder, name))
    finally:
        StepReporter.report = before  # type: ignore[method-assign]


def equal(folder: Path, ours: str, theirs: str, last: int = 6) -> None:
    assert losses(folder, ours) == losses(folder, theirs)
    mine, other = (load_tensors(folder / name / "checkpoints" / f"step-{last:08d}") for name in (ours, theirs))
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_a_signal_saves_and_the_run_goes_on_bitwise(tmp_path: Path, pool: Pool) -> None:
    assert pool.run(one_rank, 1, tmp_path, "whole") == [EXIT_DONE]
    assert pool.run(stopped_by_signal, 1, tmp_path, "stopped", 3) == [EXIT_REQUEUE]
    assert len(losses(tmp_path, "stopped")) == 3
    assert pool.run(without_drawing, 1, tmp_path, "stopped") == [EXIT_DONE]
    equal(tmp_path, "stopped", "whole")


@pytest.mark.long
def test_two_ranks_with_experts_go_on_bitwise(tmp_path: Path, pool: Pool) -> None:
    layout = {"zero": {"stage": 2}, "mesh": {"ep": 2}}
    pool.run(one_rank, 2, tmp_path, "whole", parallel=layout)
    stop = {"steps": 6, "batch_size": 8, "micro_batch_size": 2, "stop_after": 3, "eval_every": 3, "eval_sequences": 5}
    stop["baseline"] = False
    assert pool.run(one_rank, 2, tmp_path, "stopped", parallel=layout, train=stop) == [EXIT_REQUEUE] * 2
    assert pool.run(one_rank, 2, tmp_path, "stopped", parallel=layout) == [EXIT_DONE] * 2
    equal(tmp_path, "stopped", "whole")


def test_another_layout_goes_on(tmp_path: Path, pool: Pool) -> None:
    """Two ranks with their experts apart stop; one rank goes on: the data and the numbers are the same."""
    double = {"compute": "float64", "master": "float64"}
    stop = {"steps": 6, "batch_size": 8, "micro_batch_size": 2, "stop_after": 3, "eval_every": 0, "baseline": False}
    on = {**stop, "stop_after": None}
    pool.run(one_rank, 1, tmp_path, "whole", precision=double, train=on)
    pool.run(one_rank, 2, tmp_path, "moved", precision=double, train=stop, parallel={"mesh": {"ep": 2}})
    pool.run(one_rank, 1, tmp_path, "moved", precision=double, train=on)
    mine, other = torch.tensor(losses(tmp_path, "moved")), torch.tensor(losses(tmp_path, "whole"))
    assert torch.allclose(mine, other, rtol=1e-9, atol=0)


def test_another_model_in_the_folder_is_refused(tmp_path: Path, pool: Pool) -> None:
    pool.run(one_rank, 1, tmp_path, "run")
    before = metrics(tmp_path)
    wider = {"kind": "decoder", "width": 64, "stack": {"depth": 1}}
    with pytest.raises(ConfigError, match=r"contains another run: model\.\S+ was .* and is now") as caught:
        run(recipe(tmp_path, "run", model=wider))
    assert any("model.width was 32 and is now 64" in str(problem) for problem in caught.value.problems)
    assert metrics(tmp_path) == before


STOPPED = {"steps": 6, "batch_size": 8, "micro_batch_size": 2, "stop_after": 3, "eval_every": 0, "baseline": False}
ON = {**STOPPED, "stop_after": None}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of every sample that is trained on."""
    before, seen = MicroBatches.make, list[int]()

    def make(self: MicroBatches, samples: Any, *given: Any) -> Any:
        seen.extend(samples.index.tolist())
        return before(self, samples, *given)

    monkeypatch.setattr(MicroBatches, "make", make)
    return seen


@pytest.mark.long
@pytest.mark.parametrize(
    ("key", "section", "value", "consumed"),
    [("train.batch_size", "train", {**ON, "batch_size": 4}, 24), ("data.sequence_length", "data", 12, 64)],
)
def test_another_batch_or_sequence_is_a_named_decision(
    tmp_path: Path, read: list[int], key: str, section: str, value: Any, consumed: int
) -> None:
    """Refused by name, and with the decision named too it goes on at the same place of the data."""
    assert run(recipe(tmp_path, "run", train=STOPPED)) == EXIT_REQUEUE
    assert read == list(range(24))
    read.clear()
    changed = {"train": ON, section: value if section == "train" else {"sequence_length": value}}
    with pytest.raises(
        ConfigError, match=rf"{key} was \d+ and is now \d+\. .*'run\.allow_changed=\[{key}\]' resumes with it"
    ):
        run(recipe(tmp_path, "run", **changed))
    assert run(recipe(tmp_path, "run", run={"allow_changed": [key]}, **changed)) == EXIT_DONE
    size = changed["train"]["batch_size"]
    assert read == list(range(consumed, consumed + 3 * size))
    state = read_state(tmp_path / "run" / "checkpoints" / "step-00000006")
    assert state["consumed"] == consumed + 3 * size
    assert f"run.allow_changed: {key} was" in (tmp_path / "run" / "log.txt").read_text()
    # From here on it is the run's own, and nothing has to be said.
    assert run(recipe(tmp_path, "run", **{**changed, "train": {**changed["train"], "steps": 7}})) == EXIT_DONE


def test_a_place_in_the_data_in_other_sequences() -> None:
    class Nothing:
        def counters(self) -> dict[str, int]:
            return {}

        def set_counters(self, counters: dict[str, int]) -> None:
            return

    state = State(consumed=10, skipped_samples=[[3, 7]], sequence_length=32)
    found = State.decode(state.encode(Nothing()), Nothing(), 24)
    # Token 320 is within sample 13; 96 begins sample 4; 224 is within sample 9.
    assert (found.consumed, found.skipped_samples, found.sequence_length) == (14, [[4, 10]], 24)
    assert State.decode(state.encode(Nothing()), Nothing(), 32) == state
    older = State(consumed=10).encode(Nothing())
    assert State.decode(older, Nothing(), 16, 32).consumed == 20


def test_another_optimizer_is_refused_by_its_key(tmp_path: Path) -> None:
    assert run(recipe(tmp_path, "run", train=STOPPED)) == EXIT_REQUEUE
    with pytest.raises(ConfigError, match=r"optimizer\.kind was adamw and is now lion\. Choose another run\.dir"):
        run(recipe(tmp_path, "run", train=ON, optimizer={"kind": "lion"}))


def test_fresh_refuses_a_run_that_has_begun(tmp_path: Path, pool: Pool) -> None:
    pool.run(one_rank, 1, tmp_path, "run")
    with pytest.raises(ConfigError, match="refuses to resume"):
        run(recipe(tmp_path, "run", run={"fresh": True}))
