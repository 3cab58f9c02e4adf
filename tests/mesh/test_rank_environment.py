"""Ranks that cannot be are refused in a sentence; rank 0 says which are missing, and who holds the store stays."""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ports import free_ports
from xscale.cli.main import main
from xscale.cli.terminal.options import rank_from_launcher as start_as_rank
from xscale.core.errors import EXIT_USER, ConfigError, FaultError
from xscale.mesh import rendezvous
from xscale.mesh.environment import (
    RankInfo,
    bound_mlflow_attempts,
    check_rendezvous,
    read_rank_info,
    why_ranks_are_missing,
)
from xscale.mesh.rendezvous import (
    announce_leaving,
    attempt_store,
    leave_last,
    names_of,
    open_store,
    wait_for_keys,
    wait_for_name,
)
from xscale_launch.env import mpi_ranks, slurm_ranks
from xscale_launch.mpi.mpi_rank import rank_from_launcher
from xscale_launch.status import LaunchError

RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
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
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@contextlib.contextmanager
def variables(given: dict[str, str]) -> Iterator[None]:
    """Let the environment have these variables of ranks and no others."""
    names = {*RANK, *MEETING, "TORCHELASTIC_RUN_ID", "SLURM_PTY_PORT", *STEP}
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            # Set first, so that what is set in between is taken away behind it.
            patch.setenv(name, "")
            patch.delenv(name)
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
    "a rank of 5,000 digits": ({**RANK, "RANK": "9" * 5000}, "RANK: is '9999999999"),
    "a rank in other digits": ({**RANK, "RANK": "\u0663"}, "RANK: is '\u0663', which is no number"),
    "a local rank beyond": ({**RANK, "LOCAL_RANK": "2"}, "LOCAL_RANK: is 2, and the ranks of LOCAL_WORLD_SIZE=2 are"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_ranks_that_cannot_be_are_refused(case: str) -> None:
    given, sentence = REFUSED[case]
    with variables(given), pytest.raises(ConfigError) as refused:
        read_rank_info()
    assert str(refused.value).startswith(sentence)
    assert len(refused.value.problems) == 1


@pytest.mark.parametrize("case", REFUSED)
def test_the_program_refuses_them_in_a_sentence(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error is printed by rank 0, which nobody knows here."""
    given, sentence = REFUSED[case]
    monkeypatch.setattr("sys.argv", ["xscale", "train", "quickstart", f"run.dir={tmp_path / 'run'}"])
    with variables(given), pytest.raises(SystemExit) as left:
        main()
    lines = capsys.readouterr().err.splitlines()
    assert left.value.code == EXIT_USER
    assert len(lines) == 1
    assert lines[0].startswith(f"xscale: {sentence}")
    assert not (tmp_path / "run").exists()


MEETINGS = {
    "neither": ({}, "MASTER_ADDR and MASTER_PORT: are not set, and RANK and WORLD_SIZE=2 say"),
    "no address, no port": ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT: are not set"),
    "no address, port abc": ({"MASTER_PORT": "abc"}, "MASTER_ADDR: is not set"),
    "no address": ({"MASTER_PORT": "29500"}, "MASTER_ADDR: is not set, and RANK and WORLD_SIZE=2 say"),
    "no port": ({"MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT: is not set"),
    "port abc": ({**MEETING, "MASTER_PORT": "abc"}, "MASTER_PORT: is 'abc', which is no port"),
    "a port of 5,000 digits": ({**MEETING, "MASTER_PORT": "9" * 5000}, "MASTER_PORT: is '9999999999"),
    "port 0": ({**MEETING, "MASTER_PORT": "0"}, "MASTER_PORT: is '0', which is no port"),
    "port 99999": ({**MEETING, "MASTER_PORT": "99999"}, "MASTER_PORT: is '99999', which is no port"),
}


@pytest.mark.parametrize("case", MEETINGS)
def test_a_place_to_meet_that_cannot_be_is_refused(case: str) -> None:
    given, sentence = MEETINGS[case]
    with variables({**RANK, **given}), pytest.raises(ConfigError) as refused:
        check_rendezvous(2)
    assert str(refused.value).startswith(sentence)
    assert len(refused.value.problems) == 1


def test_the_program_refuses_ranks_without_a_place_to_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["xscale", "train", "quickstart", f"run.dir={tmp_path / 'run'}"])
    with variables(RANK), pytest.raises(SystemExit) as left:
        main()
    lines = capsys.readouterr().err.splitlines()
    assert left.value.code == EXIT_USER
    assert len(lines) == 1
    assert lines[0].startswith("xscale (rank 0): MASTER_ADDR and MASTER_PORT: are not set")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("said", [None, "9"])
def test_a_server_of_mlflow_that_does_not_answer_holds_no_step_for_minutes(
    said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value of the environment stays."""
    names = ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT")
    for name in names:
        # Set first, so that what is set in between is taken away behind it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name) if said is None else monkeypatch.setenv(name, said)
    bound_mlflow_attempts()
    assert [os.environ[name] for name in names] == (["2", "10"] if said is None else ["9", "9"])


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


SHELL = {**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "localhost"}
AT_ONCE = {
    "task 0 of an interactive shell": ({**SHELL, "SLURM_PTY_PORT": "1"}, True),
    "another task of it": ({**SHELL, "SLURM_PTY_PORT": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}, False),
    "a step": (SHELL, False),
    "an interactive shell of one task": ({**SHELL, "SLURM_PTY_PORT": "1", "SLURM_STEP_NUM_TASKS": "1"}, False),
    "torchrun within an interactive shell": ({**RANK, "RANK": "1", "SLURM_PROCID": "0", "SLURM_PTY_PORT": "1"}, False),
}
"""Variables -> whether rank 0 says before anything slow that it waits for ranks which may never start."""


@pytest.mark.parametrize("case", AT_ONCE)
def test_in_an_interactive_shell_rank_0_says_at_once_for_whom_it_waits(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given, says = AT_ONCE[case]
    with variables(given):
        start_as_rank()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == says
    assert all(line.startswith("xscale: rank 0 of 4 waits for the others. This is task 0 of an int") for line in lines)
    assert all("env -u SLURM_STEP_NUM_TASKS" in line for line in lines)


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


WAITING = {
    "the second rank of rank 0's node": (RankInfo(1, 4, 1, 2), True),
    "the first rank of another node": (RankInfo(2, 4, 0, 2), True),
    "the second rank of another node": (RankInfo(3, 4, 1, 2), False),
}
"""Rank -> whether it says that rank 0 is missing: one of a node does, but all of the node where rank 0 should be."""


@pytest.mark.parametrize("case", WAITING)
def test_a_rank_without_rank_0_says_for_what_it_waits(
    case: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_info, says = WAITING[case]
    port, rank = free_ports(1), rank_info.rank
    monkeypatch.setattr(rendezvous, "SAY_SECONDS", 0.2)
    with (
        variables({**RANK, **MEETING, "MASTER_PORT": str(port)}),
        pytest.raises(FaultError, match=rf"^rank {rank} waited 1 s for rank 0 of 4, .* at 127.0.0.1:{port}\. RANK and"),
    ):
        open_store(rank_info, timedelta(seconds=1))
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("xscale: ")]
    assert len(said) == says
    assert all(line.startswith(f"xscale: rank {rank} has waited 0 s for rank 0 of 4, which has the") for line in said)
    assert all("env -u RANK xscale ..." in line for line in said)


NAMES: dict[str, tuple[str, int, str | None]] = {
    # The name in MASTER_ADDR, how many questions its name service does not answer, and what is said in the end.
    "an address": ("127.0.0.1", 0, None),
    "a name that is known after a while": ("localhost", 3, None),
    "a name that nobody knows": ("no-such-host.invalid", 10**9, "no-such-host.invalid' after 0 s (not known)"),
    "no name": ("a" * 70 + ".x", 0, "x' after 0 s ("),
}


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("case", NAMES)
def test_the_name_of_rank_0_s_machine(
    case: str, says: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod's name is known some time after the pod has started; a name that is wrong is never known."""
    name, unanswered, sentence = NAMES[case]
    ask, asked = rendezvous.socket.getaddrinfo, [0]

    def answer(*given: Any) -> Any:
        asked[0] += 1
        if asked[0] <= unanswered:
            raise rendezvous.socket.gaierror(-2, "not known")
        return ask(*given)

    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", answer)
    monkeypatch.setattr(rendezvous, "SAY_SECONDS", 0.2)
    if sentence is None:
        wait_for_name(name, 29500, 60.0, says=says)
        assert asked[0] == unanswered + 1
        return
    with pytest.raises(ConfigError) as refused:
        wait_for_name(name, 29500, 0.4, says=says)
    assert str(refused.value).startswith("MASTER_ADDR: no machine is known by the name '")
    assert sentence in str(refused.value)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == says
    assert all(line.startswith("xscale: no machine is known by the name") for line in said)


@pytest.mark.parametrize("says", [True, False])
def test_a_rank_that_waits_for_others_than_rank_0_says_so(
    says: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the store is torchrun's, which answers without rank 0."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(rendezvous, "SAY_SECONDS", 0.1)
    with (
        variables(RANK),
        pytest.raises(FaultError, match=r"^rank 2 waited 0 s for the others of 4 to start\. RANK and"),
    ):
        attempt_store(store, 2, 4, timedelta(seconds=0.4), says=says)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == says
    assert not says or said[0].startswith(
        "xscale: rank 2 has waited 0 s for the other ranks of 4 to start; rank 0 names"
    )


@pytest.mark.parametrize("by", ["address", "name"])
def test_rank_0_waits_for_nobody_in_its_store(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's name is no address to listen at; torch's own store would wait there for all, and name none."""
    if by == "name":
        monkeypatch.setattr(rendezvous, "listener_of_store", lambda name, port: None)
    with variables({**RANK, **MEETING, "MASTER_PORT": str(free_ports(1))}):
        store = open_store(RankInfo(0, 2, 0, 2), timedelta(seconds=2))
        other = open_store(RankInfo(1, 2, 1, 2), timedelta(seconds=2))
    other.set("key", "value")
    assert store.get("key") == b"value"


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
