"""Facts that ranks of MPI collect about their nodes, with an MPI made of threads; `test_mpi.py` has a real one."""

import dataclasses
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xscale_launch.env import RankEnv
from xscale_launch.mpi import mpi_preflight
from xscale_launch.mpi.mpi_preflight import MpiPreflightResult, PreflightOptions
from xscale_launch.nodes import links, preflight

WELL = preflight.NodeFacts(
    "",
    address="10.0.0.1",
    head_address="10.0.0.1",
    disk_free_gigabytes=100.0,
    write_megabytes_per_second=500.0,
    python="3.11",
    packages={"torch": "2.13.0"},
    code="abc",
)


class World:
    """MPI's communicator as a thread of several sees it."""

    def __init__(self, rank: int, shared: list[Any], meet: threading.Barrier) -> None:
        self.rank, self.shared, self.meet = rank, shared, meet

    def allgather(self, mine: Any) -> list[Any]:
        self.shared[self.rank] = mine
        self.meet.wait(10)
        found = list(self.shared)
        self.meet.wait(10)
        return found

    def gather(self, mine: Any) -> list[Any] | None:
        found = self.allgather(mine)
        return found if self.rank == 0 else None

    def bcast(self, mine: Any) -> Any:
        return self.allgather(mine)[0]

    def barrier(self) -> None:
        self.allgather(None)


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[list[MpiPreflightResult], list[str]]]:
    """Runs four ranks on two nodes; returns what each found, and which nodes were looked at or measured."""
    names = threading.local()
    seen: list[str] = []

    def run(ill: dict[str, Any], speed: float = 10.0, **wanted: Any) -> tuple[list[MpiPreflightResult], list[str]]:
        def facts(node: str, *rest: Any) -> preflight.NodeFacts:
            seen.append(f"looked at {node}")
            return dataclasses.replace(WELL, node=node, hostname=node, **(ill if node == "n2" else {}))

        def measure(
            command: Any, here: RankEnv, node: str, variables: Any, folder: Path
        ) -> list[preflight.NodeProblem]:
            seen.append(f"measured {node} as {here.rank} of {here.world_size}")
            if here.rank == 0:
                (folder / "links.json").write_text(json.dumps({"gigabytes_per_second": [["n1", "n2", speed]]}))
            return []

        def rank(number: int) -> None:
            names.own = ("n1", "n2")[number // 2]
            place = RankEnv(number, 4, number % 2, 2, "10.0.0.1", 4000)
            found[number] = mpi_preflight.run_preflight(
                World(number, shared, meet), place, {}, PreflightOptions(tmp_path, **wanted)
            )

        monkeypatch.setattr(mpi_preflight.socket, "gethostname", lambda: names.own)
        monkeypatch.setattr(preflight, "facts", facts)
        monkeypatch.setattr(links, "measure", measure)
        found: list[Any] = [None] * 4
        shared: list[Any] = [None] * 4
        meet = threading.Barrier(4)
        threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return found, sorted(seen)

    return run


def test_each_node_is_looked_at_once_and_all_hear_of_it(look: Any) -> None:
    found, seen = look({}, links="measure")
    assert found[0] == found[1] == found[2] == found[3]
    assert found[0].problems == ()
    assert [facts.node for facts in found[0].nodes] == ["n1", "n2"]
    assert found[0].pairs == (("n1", "n2", 10.0),)
    assert seen == ["looked at n1", "looked at n2", "measured n1 as 0 of 2", "measured n2 as 1 of 2"]


@pytest.mark.parametrize(
    ("ill", "said"),
    [
        ({"code": "abd"}, "n2: has code abd, the others abc"),
        ({"disk_free_gigabytes": 0.5}, "n2: the run folder's disk has 0.5 GB free, 1 GB are required"),
        ({"address": "127.0.1.1"}, "n2: its own name resolves to 127.0.1.1"),
        ({"disk_free_gigabytes": math.nan, "write_megabytes_per_second": 0.0}, "n2: cannot write into the run folder"),
    ],
)
def test_a_bad_node_is_named_on_every_rank(look: Any, ill: dict[str, Any], said: str) -> None:
    found, seen = look(ill, links="measure")
    assert found[0] == found[3]
    assert any(problem.startswith(said) for problem in found[0].problems), found[0].problems
    assert not any("measured" in line for line in seen)


def test_a_slow_link_is_named(look: Any) -> None:
    found, _ = look({}, speed=1.0, links="measure", slowest_link=5.0)
    (problem,) = found[3].problems
    assert problem == "n1: its link to n2 reaches 1.00 GB/s, the minimum is 5; check the network between them"


def test_without_mpi4py_one_rank_speaks_for_its_host(tmp_path: Path) -> None:
    def found(rank: int, gigabytes: float) -> MpiPreflightResult:
        place = RankEnv(rank, 2, rank, 2, "127.0.0.1", 4000)
        return mpi_preflight.run_preflight(None, place, {}, PreflightOptions(tmp_path, disk_gigabytes=gigabytes))

    assert "GB are required" in found(0, 1e9).problems[0]
    assert len(found(0, 0.0).nodes) == 1
    assert found(1, 1e9) == MpiPreflightResult()


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    (problem,) = preflight.find_problems([preflight.facts("n1", "localhost", tmp_path / "no", tmp_path, 0)], ["n1"])
    assert "cannot write into the run folder; is the file system mounted there" in str(problem)
