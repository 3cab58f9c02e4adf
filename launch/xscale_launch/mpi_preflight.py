"""The preflight of ranks that MPI started: the first rank of each node looks at it, and rank 0 judges for all."""

import argparse
import shlex
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xscale_launch
from xscale_launch import links, preflight
from xscale_launch.env import Place
from xscale_launch.ports import free_port


@dataclass(frozen=True)
class Wanted:
    """What is looked for, and where."""

    folder: Path
    """Where the run will write."""
    gpus: int = 0
    """GPUs that each node must have."""
    disk_gigabytes: float = 1.0
    links: str = ""
    """The command that measures the links between the nodes; empty to leave them out."""
    slowest_link: float = 0.0
    """Gigabytes a second that a link must reach."""


@dataclass(frozen=True)
class Findings:
    """What came out of it; the same on every rank."""

    nodes: tuple[preflight.Facts, ...] = ()
    problems: tuple[str, ...] = ()
    """A sentence each, naming the node."""
    pairs: tuple[tuple[str, str, float], ...] = ()
    """Gigabytes a second between two nodes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options by which the launcher tells each rank what to look for."""
    parser.add_argument("--preflight", action="store_true", help="look at the nodes first")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that the preflight must see")
    parser.add_argument("--disk", type=float, default=1.0, help="gigabytes that the preflight must find free")
    parser.add_argument("--links", default="", help="the command that measures the links between the nodes")
    parser.add_argument("--slowest-link", type=float, default=0.0, help="gigabytes a second that a link must reach")


def look(world: Any, place: Place, variables: Mapping[str, str], wanted: Wanted) -> Findings:
    """This rank's part. `world` is MPI's communicator of all ranks; None where one rank has to speak for its host."""
    node = socket.gethostname()
    names = [node] if world is None else world.allgather(node)
    nodes = list(dict.fromkeys(names))
    first = place.rank == names.index(node)
    own = None
    if first:
        code, interface = Path(xscale_launch.__file__).parents[1], variables.get("GLOO_SOCKET_IFNAME", "")
        found = preflight.facts(node, place.master_addr, wanted.folder, code, wanted.gpus, interface)
        own = preflight.as_data(found)
    if world is None:
        return Findings((found,), _judged([found], nodes, wanted)) if first else Findings()
    world.barrier()  # some took longer to look than others, and clocks are compared
    said = world.gather(own and {**own, "clock": time.time()})
    findings = None
    if place.rank == 0:
        facts = [preflight.Facts(**{**one, "heard": time.time()}) for one in said if one]
        findings = Findings(tuple(facts), _judged(facts, nodes, wanted))
    known: Findings = world.bcast(findings)
    if known.problems or not wanted.links or len(nodes) == 1:
        return known
    return _measured(world, place, variables, wanted, nodes, known.nodes)


def _judged(facts: list[preflight.Facts], nodes: list[str], wanted: Wanted) -> tuple[str, ...]:
    return tuple(map(str, preflight.judge(facts, nodes, wanted.gpus, wanted.disk_gigabytes)))


def _measured(
    world: Any,
    place: Place,
    variables: Mapping[str, str],
    wanted: Wanted,
    nodes: list[str],
    facts: tuple[preflight.Facts, ...],
) -> Findings:
    """The links, measured by a process of each node's first rank."""
    port = world.bcast(free_port("") if place.rank == 0 else None)
    node = socket.gethostname()
    slow: list[preflight.Problem] = []
    if place.rank == world.allgather(node).index(node):
        here = Place(nodes.index(node), len(nodes), 0, 1, place.master_addr, port)
        slow = links.measure(shlex.split(wanted.links), here, node, variables, wanted.folder)
    problems = [problem for each in world.allgather(slow) for problem in each]
    pairs: links.Pairs = {}
    if place.rank == 0 and not problems:
        pairs = links.found(wanted.folder)
        problems = links.judge(pairs, wanted.slowest_link)
    pairs, problems = world.bcast((pairs, problems))
    return Findings(facts, tuple(map(str, problems)), tuple((*pair, speed) for pair, speed in pairs.items()))
