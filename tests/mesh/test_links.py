"""Links between nodes: every two meet once, nobody twice at a time; and two processes really measure one."""

import json
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from tests.ports import free_ports
from xscale.mesh.links import round_robin_pairs

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("count", range(2, 10))
def test_every_two_meet_once(count: int) -> None:
    found = round_robin_pairs(count)
    assert len(found) == count - 1 + count % 2
    assert sorted(pair for pairs in found for pair in pairs) == list(combinations(range(count), 2))
    for pairs in found:
        busy = [rank for pair in pairs for rank in pair]
        assert len(set(busy)) == len(busy) >= count - 1


def started(rank: int, world: int, port: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "xscale", "bench", "links", "--megabytes", "2", "--name", f"n{rank + 1}"]
    place = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {**os.environ, **place, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'launch'}"}
    return subprocess.Popen([*command, *options], env=environment, stdout=-1, stderr=-1, text=True)


@pytest.mark.long
def test_three_nodes(tmp_path: Path) -> None:
    """One of an odd count has no partner in a round, and must find its partner in the next."""
    port = free_ports()
    ranks = [started(rank, 3, port, "--out", str(tmp_path / "links.json")) for rank in range(3)]
    for rank in ranks:
        out, err = rank.communicate(timeout=600)
        assert (rank.returncode, out) == (0, ""), err
    said = json.loads((tmp_path / "links.json").read_text())
    assert said["nodes"] == ["n1", "n2", "n3"]
    pairs = {(one, other): speed for one, other, speed in said["gigabytes_per_second"]}
    assert set(pairs) == {("n1", "n2"), ("n1", "n3"), ("n2", "n3")}
    assert all(speed > 0 for speed in pairs.values())


@pytest.mark.slow
def test_one_process_has_no_links() -> None:
    alone = started(0, 1, free_ports())
    assert "a single process has no links" in alone.communicate(timeout=600)[1]
    assert alone.returncode == 2
