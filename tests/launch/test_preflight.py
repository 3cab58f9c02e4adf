"""The preflight's complaints, one by one, and its silence about nodes that are well."""

import dataclasses
from pathlib import Path

import pytest

from xscale_launch.nodes import preflight
from xscale_launch.nodes.preflight import NodeFacts, find_problems, find_slow_links

GPU = {"index": "0", "name": "H200", "memory.total": "143771", "memory.used": "4",
       "ecc.errors.uncorrected.volatile.total": "0", "temperature.gpu": "30"}  # fmt: skip


def node(name: str, **changed: object) -> NodeFacts:
    well = NodeFacts(
        node=name,
        hostname=name,
        address=f"10.0.0.{name[1:]}",
        head_address="10.0.0.1",
        clock=1000.0,
        heard=1000.2,
        disk_free_gigabytes=100.0,
        write_megabytes_per_second=800.0,
        python="3.11.7",
        packages={"torch": "2.13.0"},
        code="abc",
        gpus=[GPU, {**GPU, "index": "1"}],
    )
    return dataclasses.replace(well, **changed)  # type: ignore[arg-type]


def said(*nodes: NodeFacts, wanted: tuple[str, ...] = (), gpus: int = 2, disk: float = 1.0) -> list[str]:
    return [str(problem) for problem in find_problems(nodes, wanted or [one.node for one in nodes], gpus, disk)]


def test_well_nodes_get_no_complaint() -> None:
    assert said(node("n1"), node("n2"), node("n3")) == []


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"head_address": ""}, "n2: cannot resolve the head node's name"),
        ({"clock": 900.0}, "n2: its clock is -100 s off"),
        ({"disk_free_gigabytes": 0.5}, "n2: the run folder's disk has 0.5 GB free, 1 GB are required"),
        ({"write_megabytes_per_second": 0.0}, "n2: cannot write into the run folder"),
        ({"write_megabytes_per_second": 1.0}, "n2: writes 1.0 MB/s"),
        ({"python": "3.12.1"}, "n2: has Python 3.12.1, the others 3.11.7"),
        ({"packages": {"torch": "2.12.0"}}, "n2: has torch 2.12.0, the others 2.13.0"),
        ({"packages": {}}, "n2: has torch none, the others 2.13.0"),
        ({"code": "def"}, "n2: has code def, the others abc"),
        ({"gpus": [GPU]}, "n2: shows 1 of 2 GPUs"),
        ({"gpus": [], "gpu_fault": "nvidia-smi hangs"}, "n2: its GPUs cannot be queried: nvidia-smi hangs"),
        ({"address": "127.0.1.1"}, "n2: its own name resolves to 127.0.1.1, which no other node can reach"),
        ({"address": ""}, "n2: its own name resolves to nothing"),
        ({"gpus": [GPU, {**GPU, "index": "1", "memory.used": "60000"}]}, "n2: GPU 1 has 60000 MiB in use already"),
        (
            {"gpus": [GPU, {**GPU, "index": "1", "ecc.errors.uncorrected.volatile.total": "3"}]},
            "n2: GPU 1 has 3 uncorrected ECC errors",
        ),
    ],
)
def test_the_bad_node_is_named_with_what_is_wrong(changed: dict[str, object], complaint: str) -> None:
    found = said(node("n1"), node("n2", **changed), node("n3"))
    assert any(line.startswith(complaint) for line in found), found
    assert all(line.startswith("n2: ") for line in found)


def test_a_missing_node_is_named() -> None:
    assert said(node("n1"), wanted=("n1", "n7"), gpus=0)[0].startswith("n7: did not report in the preflight")


def test_loopback_is_fine_with_an_interface_and_on_one_node() -> None:
    assert said(node("n1", address="127.0.1.1", interface="ib0"), node("n2"), node("n3")) == []
    assert said(node("n1", address="127.0.1.1")) == []


def test_bandwidth_blames_the_node_all_of_whose_links_are_slow() -> None:
    speeds = {("a", "b"): 20.0, ("a", "c"): 21.0, ("b", "c"): 19.0, ("a", "d"): 2.0, ("b", "d"): 2.1, ("c", "d"): 1.9}
    (problem,) = find_slow_links(speeds)
    assert problem.node == "d"
    assert "2.10 GB/s at best" in problem.what


def test_bandwidth_blames_a_link_when_its_nodes_are_well() -> None:
    speeds = {("a", "b"): 20.0, ("a", "c"): 2.0, ("b", "c"): 19.0, ("a", "d"): 20.0, ("b", "d"): 20.0, ("c", "d"): 20.0}
    (problem,) = find_slow_links(speeds)
    assert (problem.node, "its link to c" in problem.what) == ("a", True)
    assert find_slow_links({("a", "b"): 1.0}) == []


def test_this_machine_has_facts(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "a.py").write_text("x = 1\n")
    first = preflight.facts("here", "localhost", tmp_path, code, 0)
    assert first.disk_free_gigabytes > 0
    assert first.write_megabytes_per_second > 0
    assert first.head_address in ("127.0.0.1", "::1")
    assert list(tmp_path.iterdir()) == [code]
    (code / "a.py").write_text("x = 2\n")
    assert preflight.digest(code) != first.code
    assert NodeFacts(**preflight.as_data(first)) == first


def test_a_folder_that_cannot_be_written_has_no_speed(tmp_path: Path) -> None:
    assert preflight.write_speed(tmp_path / "nowhere", "n1") == 0
