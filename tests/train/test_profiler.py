"""Profiles of chosen steps: a trace and a table of each rank, one of all, nothing of other steps, the same numbers."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.profiler import profile

from tests.distributed import Pool
from tests.train.tiny import losses, recipe, run
from xscale.core.errors import EXIT_DONE
from xscale.mesh.environment import read_rank_info
from xscale.observe.config import ProfileConfig
from xscale.step.phase_timer import PhaseTimer
from xscale.train.profile_tables import RankProfile, operator_table, rank_profile, rank_table
from xscale.train.profiler import StepProfiler

PROFILE = {"profile": {"at": 3, "steps": 2}}
PHASES = ["data", "communicate", "forward", "backward", "optimizer"]
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
        "ranks.txt",
        *(f"rank-{rank}.{end}" for rank in (0, 1) for end in ("txt", "json.gz")),
    }
    head, *rows = (folder / "ranks.txt").read_text().splitlines()
    assert head.split() == ["rank", "host", "computes", "x", "median", "collectives", *PHASES]
    assert {row.split()[0] for row in rows} == {"0", "1"}
    assert all(float(number) > 0 for row in rows for number in row.split()[2:]), "each rank computes and communicates"
    for rank in (0, 1):
        with gzip.open(folder / f"rank-{rank}.json.gz") as file:
            names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
        assert {name for name in names if name.startswith("step ")} == {"step 3", "step 4"}
        assert {"data", "forward", "backward", "optimizer"} <= set(names), "phases are named"
    log = (tmp_path / "profiled" / "log.txt").read_text()
    assert "profiled 2 steps" in log
    assert "ms a step of each rank, the slowest first:\n" in log
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
    assert f"Take observe.profile.at={6 - steps}." in str(problem)


def profile_of(*events: tuple[str, str, bool, float, float]) -> profile:
    """A finished profile of two steps: name, device, whether it is a range, own time and time in us, as torch sums."""
    averages = [
        SimpleNamespace(
            key=name,
            device_type=SimpleNamespace(name=device),
            is_user_annotation=is_range,
            self_cpu_time_total=own if device == "CPU" else 0.0,
            cpu_time_total=time if device == "CPU" else 0.0,
            # torch gives an operator the time of the kernels that it starts, and a range that of all kernels in it.
            self_device_time_total=own,
            flops=64 if name == "aten::mm" else 0,
            count=2,
        )
        for name, device, is_range, own, time in events
    ]
    return cast(profile, SimpleNamespace(key_averages=lambda: averages))


ON_GPU = profile_of(
    ("step 3", "CUDA", True, 4000.0, 4000.0),
    ("forward", "CUDA", True, 6000.0, 6000.0),
    ("aten::mm", "CPU", False, 5000.0, 5000.0),
    ("ampere_sgemm", "CUDA", False, 5000.0, 5000.0),
    ("softmax_kernel", "CUDA", False, 1000.0, 1000.0),
    ("nccl:all_reduce", "CUDA", True, 2000.0, 2000.0),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", "CUDA", False, 2000.0, 2000.0),
)
ON_CPU = profile_of(
    ("step 3", "CPU", True, 100.0, 9000.0),
    ("step 4", "CPU", True, 300.0, 9000.0),
    ("forward", "CPU", True, 600.0, 8000.0),
    ("aten::mm", "CPU", False, 3000.0, 3000.0),
    ("c10d::allreduce_", "CPU", False, 200.0, 200.0),
    ("gloo:all_reduce", "CPU", True, 0.0, 4000.0),
)


def test_time_on_a_gpu_is_that_of_its_kernels_once() -> None:
    table = operator_table(ON_GPU, 2, on_gpu=True)
    rows = [line.split() for line in table.partition("FLOPs of a step")[0].splitlines()[1:]]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        ("ampere_sgemm", "2.50", "62.5"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", "1.00", "25"),
        ("softmax_kernel", "0.50", "12.5"),
    ]
    # The operator that started the kernel has counted its FLOPs.
    assert "FLOPs of a step: 32," in table
    assert "no kernel was recorded" in operator_table(profile_of(), 2, on_gpu=True)


def test_the_steps_are_one_row() -> None:
    rows = [line.split() for line in operator_table(ON_CPU, 2, on_gpu=False).splitlines()[1:]]
    assert rows[:3] == [
        ["aten::mm", "1.50", "71.4", "%", "1", "32"],
        ["forward", "0.30", "14.3", "%", "1", "-"],
        ["step", "0.20", "9.5", "%", "2", "-"],
    ]


@pytest.mark.parametrize(("finished", "on_gpu", "compute"), [(ON_GPU, True, 3e-3), (ON_CPU, False, 1.6e-3)])
def test_a_rank_computes_in_all_that_is_no_collective(finished: profile, on_gpu: bool, compute: float) -> None:
    profiled = rank_profile(finished, 2, 5, "node", {"forward": 8e-3}, on_gpu=on_gpu)
    assert profiled.compute == pytest.approx(compute)
    assert profiled.collectives == pytest.approx(1e-3 if on_gpu else 2e-3)
    assert profiled.phases == {"forward": pytest.approx(4e-3)}


def test_the_slowest_rank_is_first() -> None:
    computes = [0.010, 0.030, 0.020]
    profiles = [
        RankProfile(rank, f"node-{rank}", seconds, 0.05 - seconds, {"forward": seconds})
        for rank, seconds in enumerate(computes)
    ]
    assert rank_table(profiles).splitlines() == [
        "  rank host    computes  x median collectives   forward",
        "     1 node-1     30.00      1.50       20.00     30.00",
        "     2 node-2     20.00      1.00       30.00     20.00",
        "     0 node-0     10.00      0.50       40.00     10.00",
    ]
    assert rank_table(profiles, 1).splitlines() == rank_table(profiles).splitlines()[:2]


def profiled_steps(run: Path, numbers: list[int], *, ends: bool = True) -> list[str]:
    """Messages of a profiler of steps 2 and 3 about a run of the steps `numbers`."""
    messages: list[str] = []
    config = ProfileConfig(at=2, steps=2)
    profiler = StepProfiler(config, run, read_rank_info(), PhaseTimer(torch.device("cpu")), messages.append)
    for number in numbers:
        with profiler.step(number):
            torch.ones(64, 64) @ torch.ones(64, 64)
        if profiler.is_due(stopping=False):
            profiler.write_or_repeat(number + 1)
    if ends:
        profiler.close()
    return messages


def steps_in_own_folder(folder: Path) -> list[str]:
    rank = read_rank_info().rank
    return profiled_steps(folder / f"rank-{rank}", [1, 2, 3, 4])


def steps_where_a_file_is_in_the_way(folder: Path) -> list[str]:
    rank = read_rank_info().rank
    run = folder / f"rank-{rank}"
    run.mkdir()
    if rank == 1:
        (run / "profile").touch()
    return profiled_steps(run, [1, 2, 3, 4])


def test_folders_that_are_not_shared_are_named(tmp_path: Path, pool: Pool) -> None:
    (on_rank0,), on_rank1 = pool.run(steps_in_own_folder, 2, tmp_path)
    assert on_rank1 == [], "rank 0 speaks"
    assert "run.dir is not shared by all nodes: the traces of 1 ranks are on " in on_rank0
    assert (tmp_path / "rank-1/profile/step-00000002/rank-1.json.gz").is_file()


def test_a_profile_that_cannot_be_written_ends_no_run(tmp_path: Path, pool: Pool) -> None:
    for messages in pool.run(steps_where_a_file_is_in_the_way, 2, tmp_path):
        (message,) = messages
        assert message.startswith("the profile is not complete: ")
        assert message.endswith("cannot be written (rank 1): File exists. Training continues")


def test_a_run_that_ends_within_the_steps_says_that_nothing_is_written(tmp_path: Path) -> None:
    assert profiled_steps(tmp_path, [1, 2]) == [
        "the run ends within the steps of observe.profile, of which no profile is written"
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_rollback_begins_the_profile_anew(tmp_path: Path) -> None:
    (message,) = profiled_steps(tmp_path, [1, 2, 2, 3, 4])
    assert "profiled 2 steps" in message
    with gzip.open(tmp_path / "profile/step-00000002/rank-0.json.gz") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert sorted({name for name in names if name.startswith("step ")}) == ["step 2", "step 3"]


SILENT = """
import torch
from xscale.mesh.environment import silence_profiler_log
silence_profiler_log()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
    torch.ones(2) + 1
"""


@pytest.mark.long
@pytest.mark.parametrize("level", [None, "1"])
def test_the_profiler_is_silent_unless_a_level_is_set(level: str | None) -> None:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    environment |= {} if level is None else {"KINETO_LOG_LEVEL": level}
    command = [sys.executable, "-c", SILENT]
    written = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
    assert ("ProfilerHandler" in written) is (level is not None)
