"""The preflight of ranks that MPI started: the first rank of each node checks it, and rank 0 compares the results."""

import argparse
import shlex
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xscale_launch
from xscale_launch.env import RankEnv
from xscale_launch.nodes import links, preflight
from xscale_launch.nodes.devices import free_port
from xscale_launch.status import LaunchError


@dataclass(frozen=True)
class PreflightOptions:
    """Requirements of the preflight."""

    folder: Path
    """The folder where the run will write."""
    gpus: int = 0
    """GPUs that each node must have."""
    disk_gigabytes: float = 1.0
    links: str = ""
    """The command that measures the links between the nodes; empty to skip it."""
    slowest_link: float = 0.0
    """Minimum bandwidth of a link, in GB/s."""


@dataclass(frozen=True)
class MpiPreflightResult:
    """The result of the preflight; the same on every rank."""

    nodes: tuple[preflight.NodeFacts, ...] = ()
    problems: tuple[str, ...] = ()
    """One sentence per problem, naming the node."""
    pairs: tuple[tuple[str, str, float], ...] = ()
    """Bandwidth between two nodes, in GB/s."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options with which the launcher passes the requirements to each rank."""
    parser.add_argument("--preflight", action="store_true", help="check the nodes first")
    parser.add_argument(
        "--gpus", type=int, default=0, help="GPUs that the preflight must find on each node"
    )
    parser.add_argument(
        "--disk", type=float, default=1.0, help="free disk space required by the preflight, in GB"
    )
    parser.add_argument(
        "--links", default="", help="the command that measures the links between the nodes"
    )
    parser.add_argument(
        "--slowest-link", type=float, default=0.0, help="minimum bandwidth of a link, in GB/s"
    )


def run_preflight(
    world: Any, rank_env: RankEnv, variables: Mapping[str, str], required: PreflightOptions
) -> MpiPreflightResult:
    """Run this rank's part of the preflight.

    `world` is MPI's communicator of all ranks; None without mpi4py, when all ranks are on one host.
    """
    node = socket.gethostname()
    names = [node] if world is None else world.allgather(node)
    nodes = list(dict.fromkeys(names))
    first = rank_env.rank == names.index(node)
    own_facts = None
    if first:
        code, interface = (
            Path(xscale_launch.__file__).parents[1],
            variables.get("GLOO_SOCKET_IFNAME", ""),
        )
        facts_here = preflight.facts(
            node, rank_env.master_addr, required.folder, code, required.gpus, interface
        )
        own_facts = preflight.as_data(facts_here)
    if world is None:
        return (
            MpiPreflightResult((facts_here,), _problems([facts_here], nodes, required))
            if first
            else MpiPreflightResult()
        )
    world.barrier()  # the checks take different times on each node, and clocks are compared
    gathered = world.gather(own_facts and {**own_facts, "clock": time.time()})
    result = None
    if rank_env.rank == 0:
        facts = [preflight.NodeFacts(**{**data, "heard": time.time()}) for data in gathered if data]
        result = MpiPreflightResult(tuple(facts), _problems(facts, nodes, required))
    shared: MpiPreflightResult = world.bcast(result)
    if shared.problems or not required.links or len(nodes) == 1:
        return shared
    return _measure_links(world, rank_env, variables, required, nodes, shared.nodes)


def _problems(
    facts: list[preflight.NodeFacts], nodes: list[str], required: PreflightOptions
) -> tuple[str, ...]:
    return tuple(
        map(str, preflight.find_problems(facts, nodes, required.gpus, required.disk_gigabytes))
    )


def _measure_links(
    world: Any,
    rank_env: RankEnv,
    variables: Mapping[str, str],
    required: PreflightOptions,
    nodes: list[str],
    facts: tuple[preflight.NodeFacts, ...],
) -> MpiPreflightResult:
    """Measure the links with one process per node, started by the node's first rank."""
    port = world.bcast(free_port("") if rank_env.rank == 0 else None)
    node = socket.gethostname()
    slow: list[preflight.NodeProblem] = []
    if rank_env.rank == world.allgather(node).index(node):
        node_rank_env = RankEnv(nodes.index(node), len(nodes), 0, 1, rank_env.master_addr, port)
        slow = links.measure(
            shlex.split(required.links), node_rank_env, node, variables, required.folder
        )
    problems = [str(problem) for of_node in world.allgather(slow) for problem in of_node]
    pairs: links.LinkSpeeds = {}
    if rank_env.rank == 0 and not problems:
        try:
            pairs = links.read_results(required.folder)
            problems = [
                str(problem) for problem in links.find_problems(pairs, required.slowest_link)
            ]
        except LaunchError as error:  # the other ranks wait for the result
            problems = [str(error)]
    pairs, problems = world.bcast((pairs, problems))
    return MpiPreflightResult(
        facts, tuple(problems), tuple((*pair, speed) for pair, speed in pairs.items())
    )
