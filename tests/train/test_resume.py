"""Stopped and gone on is bitwise the run that was not stopped: losses and weights, noise and data order included."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.train.tiny import losses, metrics, recipe, run
from xscale.checkpoint.loading import load_tensors
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError


def one_rank(folder: Path, name: str, **sections: Any) -> int:
    return run(recipe(folder, name, **sections))


def stopped_by_signal(folder: Path, name: str, at: int) -> int:
    """A run that sends itself SIGTERM once step `at` is logged."""
    from xscale.train.loop import Loop

    before = Loop._count

    def count(self: Loop, *stepped: Any) -> None:
        before(self, *stepped)
        if self.state.step == at:
            os.kill(os.getpid(), signal.SIGTERM)

    Loop._count = count  # type: ignore[method-assign]
    try:
        return run(recipe(folder, name))
    finally:
        Loop._count = before  # type: ignore[method-assign]


def equal(folder: Path, ours: str, theirs: str, last: int = 6) -> None:
    assert losses(folder, ours) == losses(folder, theirs)
    mine, other = (load_tensors(folder / name / "checkpoints" / f"step-{last:08d}") for name in (ours, theirs))
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_a_signal_saves_and_the_run_goes_on_bitwise(tmp_path: Path, pool: Pool) -> None:
    assert pool.run(one_rank, 1, tmp_path, "whole") == [EXIT_DONE]
    assert pool.run(stopped_by_signal, 1, tmp_path, "stopped", 3) == [EXIT_REQUEUE]
    assert len(losses(tmp_path, "stopped")) == 3
    assert pool.run(one_rank, 1, tmp_path, "stopped") == [EXIT_DONE]
    equal(tmp_path, "stopped", "whole")


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
    with pytest.raises(ConfigError, match=r"holds another run: there model\.\S+ is .* here") as caught:
        run(recipe(tmp_path, "run", model=wider))
    assert any("model.width is 32, here 64" in str(problem) for problem in caught.value.problems)
    assert metrics(tmp_path) == before


def test_fresh_refuses_a_run_that_has_begun(tmp_path: Path, pool: Pool) -> None:
    pool.run(one_rank, 1, tmp_path, "run")
    with pytest.raises(ConfigError, match="refuses to go on"):
        run(recipe(tmp_path, "run", run={"fresh": True}))
