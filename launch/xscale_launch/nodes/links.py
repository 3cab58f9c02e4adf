"""The last part of the preflight: the bandwidth between nodes, measured with the library that training will use.

`xscale bench links` measures, one process per node; the launcher starts it and evaluates the result.
"""

import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xscale_launch.env import RankEnv, integer
from xscale_launch.files import read_run_file
from xscale_launch.nodes.preflight import NodeProblem, find_slow_links
from xscale_launch.nodes.worker_environment import worker_environment
from xscale_launch.status import LaunchError
from xscale_launch.typed_json import decode_json

SECONDS = 240.0
LinkSpeeds = dict[tuple[str, str], float]
"""Bandwidth between two nodes, in GB/s."""


@dataclass(frozen=True)
class LinkResults:
    """The result of `xscale bench links`, as it is in the file."""

    gigabytes_per_second: list[tuple[str, str, float]]
    """Two nodes and the bandwidth between them."""


def should_measure(rank_env: RankEnv, variables: Mapping[str, str]) -> bool:
    """Return whether this task measures: the first task of its node, if there are several nodes."""
    return rank_env.local_rank == 0 and integer(variables, "SLURM_NNODES") > 1


def rank_of_node(rank_env: RankEnv, variables: Mapping[str, str]) -> RankEnv:
    """Return this node's rank among one process per node, at the port of the node check, which has ended."""
    rank, world = integer(variables, "SLURM_NODEID"), integer(variables, "SLURM_NNODES")
    return RankEnv(rank, world, 0, 1, rank_env.master_addr, rank_env.master_port + 1)


def measure(
    command: Sequence[str], rank_env: RankEnv, node: str, variables: Mapping[str, str], folder: Path
) -> list[NodeProblem]:
    """Run the measurement on this node; rank 0 writes `folder/links.json`. Returns the problem when it failed."""
    argv = [*command, "--name", node, "--out", str(folder / "links.json")]
    fix = "training would fail the same way; is the network interface correct (profile: interface)?"
    try:
        done = subprocess.run(
            argv,
            env=worker_environment(variables, rank_env),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [
            NodeProblem(
                node,
                f"the all-reduce with the other nodes did not finish within {SECONDS:g} s",
                fix,
            )
        ]
    except OSError as error:
        return [
            NodeProblem(
                node,
                f"{argv[0]} cannot be started ({error.strerror})",
                "is it installed on the node?",
            )
        ]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return [NodeProblem(node, f"the links to the other nodes cannot be measured: {last}", fix)]
    return []


def read_results(folder: Path) -> LinkSpeeds:
    """Read the result that the head node wrote; raise `LaunchError` when it is missing or damaged."""
    path = folder / "links.json"
    try:
        results: LinkResults = decode_json(read_run_file(path), LinkResults)
        if not results.gigabytes_per_second:
            raise ValueError("it has no link")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise LaunchError(
            f"{path}, the measured bandwidth of the links, cannot be used: {why}; start again"
        ) from None
    return {(first, second): speed for first, second, speed in results.gigabytes_per_second}


def find_problems(pairs: LinkSpeeds, minimum: float) -> list[NodeProblem]:
    """Find nodes whose links are much slower than the others', or below `minimum` GB/s (0: no minimum)."""
    problems = find_slow_links(pairs)
    named = {problem.node for problem in problems}
    for (first, second), speed in sorted(pairs.items()):
        if speed < minimum and not named & {first, second}:
            what = f"its link to {second} reaches {speed:.2f} GB/s, the minimum is {minimum:g}"
            problems.append(NodeProblem(first, what, "check the network between them"))
            named.add(first)
    return problems


def summary(pairs: LinkSpeeds) -> str:
    """Summarise the links in one line."""
    (first, second), slowest = min(pairs.items(), key=lambda item: item[1])
    median = statistics.median(pairs.values())
    count = "1 link" if len(pairs) == 1 else f"{len(pairs)} links"
    return f"{count} between nodes: median {median:.2f} GB/s, slowest {slowest:.2f} ({first} - {second})"
