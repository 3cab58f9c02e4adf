"""The preflight's last part: how fast the nodes are together, measured by the library that training will use.

`xscale bench links` does the measuring, once on each node; the launcher starts it and judges what it found.
"""

import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from xscale_launch.env import Place, whole
from xscale_launch.local import worker_environment
from xscale_launch.preflight import Problem, judge_bandwidth

SECONDS = 240.0
Pairs = dict[tuple[str, str], float]
"""Gigabytes a second between two nodes."""


def wanted(place: Place, variables: Mapping[str, str]) -> bool:
    """Whether this task measures: the first of its node, where there are several nodes."""
    return place.local_rank == 0 and whole(variables, "SLURM_NNODES") > 1


def of_step(place: Place, variables: Mapping[str, str]) -> Place:
    """Of one process a node of a Slurm step this node's place, at the port of the roll-call, which is over."""
    rank, world = whole(variables, "SLURM_NODEID"), whole(variables, "SLURM_NNODES")
    return Place(rank, world, 0, 1, place.master_addr, place.master_port + 1)


def measure(
    command: Sequence[str], here: Place, node: str, variables: Mapping[str, str], folder: Path
) -> list[Problem]:
    """This node's part; rank 0 leaves what was measured in `folder/links.json`. The problem when it could not be."""
    argv = [*command, "--name", node, "--out", str(folder / "links.json")]
    advice = "training would fail the same way; is the network interface the right one (profile: interface)?"
    try:
        done = subprocess.run(
            argv, env=worker_environment(variables, here), capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return [Problem(node, f"the links to the other nodes gave no answer within {SECONDS:g} s", advice)]
    except OSError as error:
        return [Problem(node, f"{argv[0]} cannot be started ({error.strerror})", "is it installed on the node?")]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return [Problem(node, f"the links to the other nodes cannot be measured: {last}", advice)]
    return []


def found(folder: Path) -> Pairs:
    """What the head node left."""
    said = json.loads((folder / "links.json").read_text())
    return {(one, other): float(speed) for one, other, speed in said["gigabytes_per_second"]}


def judge(pairs: Pairs, least: float) -> list[Problem]:
    """The nodes whose links are much slower than the others', or below `least` gigabytes a second (0: none is)."""
    problems = judge_bandwidth(pairs)
    named = {problem.node for problem in problems}
    for (one, other), speed in sorted(pairs.items()):
        if speed < least and not named & {one, other}:
            what = f"its link to {other} gives {speed:.2f} GB/s of the {least:g} wanted"
            problems.append(Problem(one, what, "look at the network between them"))
            named.add(one)
    return problems


def described(pairs: Pairs) -> str:
    """The links in a line."""
    (one, other), slowest = min(pairs.items(), key=lambda item: item[1])
    usual = statistics.median(pairs.values())
    return f"{len(pairs)} link(s) between nodes: {usual:.2f} GB/s, the slowest {slowest:.2f} ({one} - {other})"
