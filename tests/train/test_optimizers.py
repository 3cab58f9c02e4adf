"""Runs by each optimizer that is not elementwise, with parameter groups: stopped, resumed, moved to another layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.parallel.models import SHALLOW
from tests.train.tiny import losses, recipe, run
from xscale.checkpoint.load import load_tensors
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE

STEPS = 4
GROUPS = [{"match": "*.router.*", "lr_factor": 0.5, "weight_decay": 0.0}, {"match": "*.experts.*", "lr_factor": 2.0}]
OPTIMIZERS_IN_DOUBLE: dict[str, dict[str, Any]] = {
    "muon": {"kind": "muon", "ns_dtype": "float64", "groups": GROUPS},
    "adafactor": {"kind": "adafactor", "beta1": 0.5, "groups": GROUPS},
}
SHARDED = {"mesh": {"dp_shard": 2, "tp": 2}, "zero": {"stage": 3}}
EXPERTS = {"mesh": {"dp_shard": 4, "ep": 2}, "zero": {"stage": 2}}


def one_rank(folder: Path, name: str, kind: str, parallel: dict[str, Any], stop_after: int | None = None) -> int:
    train = {"steps": STEPS, "batch_size": 8, "micro_batch_size": 2, "eval_every": 0, "stop_after": stop_after}
    sections: dict[str, Any] = {
        "model": SHALLOW["mixture"],
        "optimizer": OPTIMIZERS_IN_DOUBLE[kind],
        "precision": {"compute": "float64", "master": "float64"},
        "parallel": parallel,
        "train": {**train, "baseline": False},
        "data": {"validation": 0.0},
    }
    return run(recipe(folder, name, **sections))


def end(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_tensors(folder / name / "checkpoints" / f"step-{STEPS:08d}")


@pytest.mark.parametrize("kind", ["muon", pytest.param("adafactor", marks=pytest.mark.nightly)])
@pytest.mark.long
def test_resumed_is_bitwise_and_any_layout_reads_the_states(kind: str, tmp_path: Path, pool: Pool) -> None:
    assert pool.run(one_rank, 1, tmp_path, "alone", kind, {}) == [EXIT_DONE]
    assert pool.run(one_rank, 4, tmp_path, "whole", kind, SHARDED) == [EXIT_DONE] * 4
    assert pool.run(one_rank, 4, tmp_path, "stopped", kind, SHARDED, 2) == [EXIT_REQUEUE] * 4
    assert pool.run(one_rank, 4, tmp_path, "stopped", kind, SHARDED) == [EXIT_DONE] * 4
    assert losses(tmp_path, "stopped") == losses(tmp_path, "whole")
    resumed, whole, alone = (end(tmp_path, name) for name in ("stopped", "whole", "alone"))
    assert resumed.keys() == whole.keys() == alone.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert pool.run(one_rank, 4, tmp_path, "moved", kind, SHARDED, 2) == [EXIT_REQUEUE] * 4
    assert pool.run(one_rank, 4, tmp_path, "moved", kind, EXPERTS) == [EXIT_DONE] * 4
    for name, value in end(tmp_path, "moved").items():
        assert value.shape == alone[name].shape
        assert torch.allclose(value, alone[name], rtol=1e-9, atol=1e-10), name
    log = (tmp_path / "alone" / "log.txt").read_text()
    assert "optimizer group '*.router.*' (lr_factor 0.5, weight_decay 0): 1 tensors, 128 parameters" in log
