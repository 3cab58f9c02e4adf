"""A loss that jumps or is no number: skipped, gone back from, or the end; by all ranks alike, resumed alike."""

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.distributed import Pool, RankError
from tests.train.test_resume import equal
from tests.train.tiny import losses, metrics, recipe, run
from xscale.checkpoint.load import load_tensors, read_state
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE
from xscale.settings.settings import TrainConfig
from xscale.step.batches import MicroBatches
from xscale.step.stepper import Stepper
from xscale.train.after_step.step_reporter import StepReporter
from xscale.train.optimizer_step.loss_spikes import decide

BAD = 42
"""A sample of step 6, counted from 1, at a batch of 8."""
TRAIN = {"steps": 8, "batch_size": 8, "micro_batch_size": 2, "eval_every": 0, "baseline": False}
DOUBLE = {"compute": "float64", "master": "float64"}


def spiked(
    folder: Path,
    name: str,
    factor: float,
    stop_at: int | None = None,
    how: signal.Signals = signal.SIGTERM,
    **sections: Any,
) -> int:
    """A run in which one sample makes the loss of its micro-batch `factor` times what it is."""
    training, nats, count = MicroBatches.make, Stepper._forward_backward, StepReporter.report
    met: list[bool] = []

    def watched(self: MicroBatches, samples: Any, *given: Any) -> Any:
        met.extend([True] * (BAD in samples.index))
        return training(self, samples, *given)

    def spoiled(self: Stepper, *given: Any) -> Tensor:
        found = nats(self, *given)
        times, met[:] = factor if met else 1.0, []
        return found * times

    def counted(self: StepReporter, *given: Any) -> None:
        count(self, *given)
        if self.state.step == stop_at and self.state.skipped_samples:
            os.kill(os.getpid(), how)

    MicroBatches.make, Stepper._forward_backward, StepReporter.report = watched, spoiled, counted  # type: ignore[method-assign,assignment]
    try:
        return run(recipe(folder, name, **{"precision": DOUBLE, "checkpoint": {"every_steps": 4}, **sections}))
    finally:
        MicroBatches.make, Stepper._forward_backward, StepReporter.report = training, nats, count  # type: ignore[method-assign]


def policy(name: str, **more: Any) -> dict[str, Any]:
    return {**TRAIN, "spike": {"policy": name, "window": 6, "floor": 0.5}, **more}


def log(folder: Path, name: str) -> str:
    return (folder / name / "log.txt").read_text(encoding="utf-8")


def ends(folder: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    last = folder / name / "checkpoints" / "step-00000008"
    return load_tensors(last), read_state(last)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "zero1": (2, {"mesh": {"ep": 2}}),
    "pp2": (2, {"mesh": {"pp": 2}}),
}


@pytest.mark.long
def test_back_to_the_last_good_and_over_the_data(tmp_path: Path, pool: Pool) -> None:
    """On every layout the same steps on the same samples; each step once in the metrics."""
    for name, (ranks, parallel) in LAYOUTS.items():
        train = policy("rollback")
        assert pool.run(spiked, ranks, tmp_path, name, 20.0, train=train, parallel=parallel) == [EXIT_DONE] * ranks
        state = ends(tmp_path, name)[1]
        # Back from step 6, which was to take samples 40 to 47, to step 4: what 5 and 6 read is left out.
        assert state["skipped_samples"] == [[32, 48]]
        assert state["consumed"] == 80
        assert len(state["losses"]) == 6
        assert [line["step"] for line in metrics(tmp_path, name) if "loss" in line] == list(range(1, 9))
        assert "; rolled back to step 4, skipping samples 32 to 47" in log(tmp_path, name)
        for mine, one in zip(losses(tmp_path, name), losses(tmp_path, "1"), strict=True):
            assert math.isclose(mine, one, rel_tol=1e-9)
    # What comes after the return is bitwise the same when the run is stopped there and goes on.
    train = policy("rollback")
    assert pool.run(spiked, 1, tmp_path, "stopped", 20.0, 7, train=train) == [EXIT_REQUEUE]
    assert read_state(tmp_path / "stopped" / "checkpoints" / "step-00000007")["skipped_samples"] == [[32, 48]]
    assert pool.run(spiked, 1, tmp_path, "stopped", 20.0, train=train) == [EXIT_DONE]
    equal(tmp_path, "stopped", "1", 8)


@pytest.mark.long
def test_memory_forgets_what_was_gone_back_from(tmp_path: Path, pool: Pool) -> None:
    """Killed after the return: a state from before it, with the same number, is of samples that are left out now."""
    kept = {"every_steps": 4, "memory_every_steps": 1, "memory_folder": str(tmp_path)}
    given = {"train": policy("rollback"), "checkpoint": kept}
    assert pool.run(spiked, 2, tmp_path, "whole", 20.0, **given) == [EXIT_DONE] * 2
    with pytest.raises(RankError):
        pool.run(spiked, 2, tmp_path, "killed", 20.0, 6, signal.SIGKILL, **given)
    # The spike does not come again, so that nothing would mend it.
    assert pool.run(spiked, 2, tmp_path, "killed", 1.0, **given) == [EXIT_DONE] * 2
    assert "resuming from the in-memory checkpoint of step 5" in log(tmp_path, "killed")
    assert ends(tmp_path, "killed")[1]["skipped_samples"] == ends(tmp_path, "whole")[1]["skipped_samples"]
    equal(tmp_path, "killed", "whole", 8)


def test_the_step_is_skipped(tmp_path: Path, pool: Pool) -> None:
    every = {"every_steps": 1, "keep_last": None}
    pool.run(spiked, 2, tmp_path, "skip", 20.0, train=policy("skip"), checkpoint=every)
    before, after = (load_tensors(tmp_path / "skip" / "checkpoints" / f"step-0000000{step}") for step in (5, 6))
    assert all(before[name].equal(after[name]) for name in before)
    state = ends(tmp_path, "skip")[1]
    assert (state["skipped"], state["skipped_in_a_row"], state["consumed"], state["skipped_samples"]) == (1, 0, 64, [])
    assert "; the 5 losses before have median" in log(tmp_path, "skip")
    # The control: without a policy the step is taken, and only the logged loss tells.
    pool.run(spiked, 1, tmp_path, "none", 20.0, train=policy("none"), checkpoint=every)
    before, after = (load_tensors(tmp_path / "none" / "checkpoints" / f"step-0000000{step}") for step in (5, 6))
    assert not all(before[name].equal(after[name]) for name in before)


def test_the_run_ends(tmp_path: Path, pool: Pool) -> None:
    with pytest.raises(RankError, match=r"step 6: the loss \(\S+\) is a spike: .* the policy is to stop"):
        pool.run(spiked, 2, tmp_path, "stop", 20.0, train=policy("stop"))
    assert [path.name for path in (tmp_path / "stop" / "checkpoints").iterdir()] == ["step-00000004"]
    limits = policy("none", nonfinite="skip", skip_limit=0)
    with pytest.raises(
        RankError, match=r"step 6: the loss \(nan\) .* is not finite, skipped step 1 in a row; train.skip_limit"
    ):
        pool.run(spiked, 1, tmp_path, "nan", math.nan, train=limits)


def test_a_loss_that_is_no_number_is_gone_back_from(tmp_path: Path, pool: Pool) -> None:
    """Before the first checkpoint too: the run then begins again, with other data."""
    train = policy("none", nonfinite="rollback")
    assert pool.run(spiked, 1, tmp_path, "run", math.nan, train=train, checkpoint={"every_steps": 0}) == [EXIT_DONE]
    assert ends(tmp_path, "run")[1]["skipped_samples"] == [[0, 48]]
    with pytest.raises(RankError, match=r"after 1 rollbacks to step 0 \(train.rollback_limit\)"):
        pool.run(always, 1, tmp_path, "always", train={**train, "rollback_limit": 1})


def always(folder: Path, name: str, **sections: Any) -> int:
    """Each step's loss is no number."""
    before = Stepper._forward_backward
    Stepper._forward_backward = lambda self, *given: before(self, *given) * math.nan  # type: ignore[method-assign]
    try:
        return run(recipe(folder, name, **sections))
    finally:
        Stepper._forward_backward = before  # type: ignore[method-assign]


def test_what_a_spike_is() -> None:
    def action(losses: list[float], loss: float, norm: float = 1.0, **more: Any) -> str:
        given = {"policy": "skip", "window": 10, "floor": 0.1, **more}
        return decide(TrainConfig(spike=given, nonfinite="rollback"), losses, loss, norm).action  # type: ignore[arg-type]

    usual = [2.0, 2.1, 1.9, 2.05, 1.95]
    assert action(usual[:4], 50.0) == "accept", "too little is known"
    assert action(usual, 50.0) == "skip"
    assert action(usual, 50.0, policy="none") == "accept"
    assert action(usual, 2.3) == "accept"
    assert action(usual, 2.5) == "skip"
    assert action([*usual, 90.0, 80.0], 3.0) == "skip", "outliers among the losses do not hide the next one"
    assert action([2.0] * 8, 2.19) == "accept", "the floor"
    assert action([2.0] * 8, 2.21) == "skip"
    for loss, norm in ((math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan)):
        assert action(usual, loss, norm) == "rollback"
