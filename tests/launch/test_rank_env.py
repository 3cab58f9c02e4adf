"""A rank for a program that srun or mpirun started itself; never N of them that each think to be the only one."""

import os

import pytest

from xscale_launch.env import RankEnv
from xscale_launch.mpi import mpi_rank
from xscale_launch.status import LaunchError

STEP = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
}


def test_alone_is_alone() -> None:
    assert mpi_rank.rank_from_launcher({}) is None
    # The batch script of a job is no task of a step.
    assert (
        mpi_rank.rank_from_launcher({name: value for name, value in STEP.items() if not name.startswith("SLURM_STEP")})
        is None
    )


def test_a_task_of_a_slurm_step_knows_its_rank() -> None:
    assert mpi_rank.rank_from_launcher(STEP) == RankEnv(3, 4, 1, 2, "n1", 20014)


def test_mpi_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    place = RankEnv(1, 4, 1, 2, "10.0.0.1", 4000)
    monkeypatch.setattr(mpi_rank, "rank_from_mpi", lambda: place)
    assert mpi_rank.rank_from_launcher({"OMPI_COMM_WORLD_SIZE": "4"}) == place
    assert mpi_rank.rank_from_launcher({**STEP, "PMIX_RANK": "3"}) == place
    # An MPI that Slurm does not know makes each task the only one of a world of its own.
    monkeypatch.setattr(mpi_rank, "rank_from_mpi", lambda: RankEnv(0, 1, 0, 1, "127.0.0.1", 4000))
    assert mpi_rank.rank_from_launcher({**STEP, "PMIX_RANK": "3"}) == RankEnv(3, 4, 1, 2, "n1", 20014)
    with pytest.raises(LaunchError, match="mpi4py uses another MPI than this mpirun"):
        mpi_rank.rank_from_launcher({"PMI_SIZE": "4", "PMI_RANK": "0"})


def test_without_mpi4py_nothing_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_rank, "rank_from_mpi", lambda: None)
    with pytest.raises(LaunchError, match="mpirun started 4 processes, but mpi4py is not installed"):
        mpi_rank.rank_from_launcher({"OMPI_COMM_WORLD_SIZE": "4"})
    assert mpi_rank.rank_from_launcher({"OMPI_COMM_WORLD_SIZE": "1"}) is None


def test_what_is_found_is_where_libraries_look(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PMIX_ID", "1")
    mpi_rank.set_rank_env()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]) == ("3", "4", "n1")
    assert "PMIX_ID" not in os.environ
    monkeypatch.setenv("SLURM_PROCID", "2")
    mpi_rank.set_rank_env()  # a launcher's word stands
    assert os.environ["RANK"] == "3"
