"""Ranks that cannot be are refused in a sentence; rank 0 says which are missing, and who holds the store stays."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from xscale.core.errors import ConfigError, FaultError
from xscale.mesh import rendezvous
from xscale.mesh.environment import check_rendezvous, read_rank_info, why_ranks_are_missing
from xscale.mesh.rendezvous import announce_leaving, attempt_store, leave_last, names_of, wait_for_keys
from xscale_launch.env import mpi_ranks, slurm_ranks
from xscale_launch.mpi.mpi_rank import rank_from_launcher
from xscale_launch.status import LaunchError

RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@contextlib.contextmanager
def variables(given: dict[str, str]) -> Iterator[None]:
    """Let the environment have these variables of ranks and no others."""
    names = {*RANK, *MEETING, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_PTY_PORT", "TORCHELASTIC_RUN_ID"}
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.delenv(name, raising=False)
        for name, value in given.items():
            patch.setenv(name, value)
        yield


REFUSED = {
    "RANK=abc": ({**RANK, "RANK": "abc"}, "RANK: is 'abc', which is no number"),
    "RANK is empty": ({**RANK, "RANK": ""}, "RANK: is '', which is no number"),
    "a negative rank": ({**RANK, "RANK": "-1"}, "RANK: is '-1', which is no number"),
    "LOCAL_RANK is empty": ({**RANK, "LOCAL_RANK": ""}, "LOCAL_RANK: is '', which is no number"),
    "WORLD_SIZE=two": ({**RANK, "WORLD_SIZE": "two"}, "WORLD_SIZE: is 'two', which is no number"),
    "WORLD_SIZE=0": ({**RANK, "WORLD_SIZE": "0"}, "RANK: is 0, and the ranks of WORLD_SIZE=0 are"),
    "a rank beyond the world": ({**RANK, "RANK": "5"}, "RANK: is 5, and the ranks of WORLD_SIZE=2 are 0 to 1"),
    "a local rank beyond": ({**RANK, "LOCAL_RANK": "2"}, "LOCAL_RANK: is 2, and the ranks of LOCAL_WORLD_SIZE=2 are"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_ranks_that_cannot_be_are_refused(case: str) -> None:
    given, sentence = REFUSED[case]
    with variables(given), pytest.raises(ConfigError) as refused:
        read_rank_info()
    assert str(refused.value).startswith(sentence)
    assert len(refused.value.problems) == 1


MEETINGS = {
    "no address": ({"MASTER_PORT": "29500"}, "MASTER_ADDR: is not set, and RANK and WORLD_SIZE=2 say"),
    "no port": ({"MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT: is not set"),
    "port abc": ({**MEETING, "MASTER_PORT": "abc"}, "MASTER_PORT: is 'abc', which is no port"),
    "port 0": ({**MEETING, "MASTER_PORT": "0"}, "MASTER_PORT: is '0', which is no port"),
    "port 99999": ({**MEETING, "MASTER_PORT": "99999"}, "MASTER_PORT: is '99999', which is no port"),
}


@pytest.mark.parametrize("case", MEETINGS)
def test_a_place_to_meet_that_cannot_be_is_refused(case: str) -> None:
    given, sentence = MEETINGS[case]
    with variables({**RANK, **given}), pytest.raises(ConfigError) as refused:
        check_rendezvous(2)
    assert str(refused.value).startswith(sentence)


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
one_per_task = partial(slurm_ranks, processes=1)
LAUNCHED: dict[str, tuple[Any, dict[str, str], str]] = {
    "task 5 of 4": (one_per_task, {**STEP, "SLURM_PROCID": "5"}, "SLURM_PROCID is 5, but SLURM_NTASKS is 4"),
    "a negative task": (one_per_task, {**STEP, "SLURM_PROCID": "-1"}, "SLURM_PROCID is -1, but SLURM_NTASKS is 4"),
    "port abc": (one_per_task, {**STEP, "MASTER_PORT": "abc"}, "MASTER_PORT is 'abc', expected an integer"),
    "port 0": (one_per_task, {**STEP, "MASTER_PORT": "70000"}, "MASTER_PORT is 70000, which is no port"),
    "restart x": (
        one_per_task,
        {**STEP, "SLURM_RESTART_COUNT": "x"},
        "SLURM_RESTART_COUNT is 'x', expected an integer",
    ),
    "tasks of nodes": (
        one_per_task,
        {**STEP, "SLURM_STEP_TASKS_PER_NODE": "two"},
        "SLURM_STEP_TASKS_PER_NODE is 'two'",
    ),
    "tasks of a step": (rank_from_launcher, {**STEP, "SLURM_STEP_NUM_TASKS": "x"}, "SLURM_STEP_NUM_TASKS is 'x'"),
    "MPI's size": (rank_from_launcher, {"OMPI_COMM_WORLD_SIZE": "x"}, "OMPI_COMM_WORLD_SIZE is 'x'"),
    "MPI's rank": (mpi_ranks, {"PMI_RANK": "2", "PMI_SIZE": "2"}, "PMI_RANK is 2, but PMI_SIZE is 2"),
}


@pytest.mark.parametrize("case", LAUNCHED)
def test_variables_of_slurm_and_mpi_are_refused_in_a_sentence(case: str) -> None:
    function, given, sentence = LAUNCHED[case]
    with pytest.raises(LaunchError) as refused:
        function(given)
    assert str(refused.value).startswith(sentence)


CAUSES = {
    "an interactive shell": (
        {**RANK, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_PTY_PORT": "1"},
        "env -u SLURM_STEP_NUM_TASKS",
    ),
    "torchrun": ({**RANK, "TORCHELASTIC_RUN_ID": "1"}, "the same torchrun command on every node"),
    "by hand": (RANK, "env -u RANK"),
}


@pytest.mark.parametrize("case", CAUSES)
def test_the_cause_of_a_missing_rank_is_that_of_its_launcher(case: str) -> None:
    given, command = CAUSES[case]
    with variables(given):
        assert command in why_ranks_are_missing(2)


def test_rank_0_says_which_ranks_are_missing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(rendezvous, "SAY_SECONDS", 0.1)
    with pytest.raises(
        FaultError, match=r"ranks 1, 2, 3 of 4 did not start within 0 s\. RANK and WORLD_SIZE=4 are set"
    ):
        attempt_store(store, 0, 4, timedelta(seconds=0.4))
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("xscale: rank 0 has waited 0 s for ranks 1, 2, 3 to start. RANK and")


def test_ranks_that_came_are_not_named(capfd: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("1", "")
    assert wait_for_keys(store, {1: "1", 2: "2"}, 0.3, 0.1, "to end") == [2]
    assert "for rank 2 to end" in capfd.readouterr().err
    store.set("2", "")
    assert wait_for_keys(store, {1: "1", 2: "2"}, 0.3, 0.0, "to end") == []
    assert capfd.readouterr().err == ""
    assert names_of(range(1, 12)) == "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more"


def test_the_rank_with_the_store_ends_without_one_that_never_does(capfd: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    announce_leaving(store, 1)
    leave_last(store, 3, 0.2)
    assert capfd.readouterr().err == "xscale: rank 0 ends without rank 2, after 0 s\n"
