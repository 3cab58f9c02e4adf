"""Profiles of chosen steps: a trace and a table of each rank, nothing of other steps, the same numbers."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.train.tiny import losses, recipe, run
from xscale.core.errors import EXIT_DONE
from xscale.train.profiler import operator_table

PROFILE = {"profile": {"at": 3, "steps": 2}}
TRAIN = {"steps": 5, "eval_every": 0}


def one_rank(folder: Path, name: str, **sections: Any) -> int:
    return run(recipe(folder, name, train=TRAIN, **sections))


@pytest.mark.long
def test_each_rank_writes_its_trace_of_the_steps_named(tmp_path: Path, pool: Pool) -> None:
    layout = {"mesh": {"dp_shard": 2}}
    assert pool.run(one_rank, 2, tmp_path, "plain", parallel=layout) == [EXIT_DONE] * 2
    assert pool.run(one_rank, 2, tmp_path, "profiled", parallel=layout, observe=PROFILE) == [EXIT_DONE] * 2
    assert losses(tmp_path, "profiled") == losses(tmp_path, "plain")
    folder = tmp_path / "profiled" / "profile" / "step-00000003"
    assert {path.name for path in folder.iterdir()} == {
        f"rank-{rank}.{end}" for rank in (0, 1) for end in ("txt", "json.gz")
    }
    for rank in (0, 1):
        with gzip.open(folder / f"rank-{rank}.json.gz") as file:
            names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
        assert {name for name in names if name.startswith("step ")} == {"step 3", "step 4"}
        assert {"data", "forward", "backward", "optimizer"} <= set(names), "phases are named"
    log = (tmp_path / "profiled" / "log.txt").read_text()
    assert "profiled 2 step(s)" in log
    assert "FLOPs of a step" in log
    assert not (tmp_path / "plain" / "profile").exists()


def test_the_flops_of_a_step_are_those_of_its_products() -> None:
    a, b = torch.randn(64, 32), torch.randn(32, 16)
    with torch.profiler.profile(with_flops=True) as finished:
        for _ in range(6):
            a @ b
    # Two steps of three products each, of 2 x 64 x 32 x 16 FLOPs.
    table = operator_table(finished, 2, on_gpu=False)
    (row,) = [line.split() for line in table.splitlines() if line.startswith("aten::mm") and len(line.split()) > 4]
    assert row[-2:] == ["3", "197k"]
    assert "FLOPs of a step: 197k" in table


@pytest.mark.parametrize(("at", "steps"), [(5, 2), (6, 1)])
def test_steps_behind_the_end_are_refused(tmp_path: Path, at: int, steps: int) -> None:
    asked = recipe(tmp_path, train=TRAIN, observe={"profile": {"at": at, "steps": steps}})
    (problem,) = asked.check(1)
    assert str(problem).startswith(f"observe.profile: profiles steps {at} to {at + steps - 1}, and the run ends at")
    assert f"at most {6 - steps}" in str(problem)
