"""`xscale doctor`: check this machine, or every node of the allocation it is started in. Needs no torch."""

import argparse
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xscale_launch
from xscale_launch import command, status
from xscale_launch.command import say, write
from xscale_launch.env import RankEnv, environment, slurm_ranks
from xscale_launch.mpi import mpi_preflight
from xscale_launch.mpi.mpi_rank import STARTED_BY_MPI, rank_from_mpi
from xscale_launch.nodes import devices, links, preflight
from xscale_launch.nodes.node_check import check_node
from xscale_launch.nodes.worker_environment import HOST
from xscale_launch.paths import path_argument
from xscale_launch.status import LaunchError

FAULTY = 1
LINKS = (command.PYTHON, "-m", "xscale", "bench", "links")


def main(argv: Sequence[str]) -> int:
    """Print the facts and the problems of the nodes; exit status 1 when there is a problem."""
    try:
        return _check(argv)
    except LaunchError as error:
        say(str(error))
        return status.USER_MISTAKE


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of `xscale doctor`."""
    parser = command.VerbParser(prog="xscale doctor", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--folder",
        type=path_argument,
        default=Path(),
        help="where run folders will be written; default: the working directory",
    )
    parser.add_argument(
        "--gpus", type=int, help="GPUs that every node must have; default: the number visible here"
    )
    parser.add_argument("--disk", type=float, default=1.0, help="required free disk space, in GB")
    parser.add_argument(
        "--no-links", action="store_true", help="skip the all-reduce measured between nodes"
    )
    parser.add_argument("--task", action="store_true", help=argparse.SUPPRESS)
    return parser


def _check(argv: Sequence[str]) -> int:
    parser = argument_parser()
    try:
        options = parser.parse_args(list(argv))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else status.USER_MISTAKE
    if not options.folder.is_dir():
        say(f"folder {options.folder} does not exist")
        return status.USER_MISTAKE
    variables = environment()
    gpus = devices.gpus(variables) if options.gpus is None else options.gpus
    if options.task:
        return _task(options, gpus)
    if "SLURM_JOB_ID" in variables:
        srun = [
            "srun",
            "--export=ALL",
            "--ntasks-per-node=1",
            command.PYTHON,
            "-m",
            "xscale_launch.doctor",
            "--task",
        ]
        return subprocess.run([*srun, *argv], check=False).returncode
    if any(name in variables for name in STARTED_BY_MPI):
        return _rank(options, gpus)
    name = socket.gethostname()
    # The rendezvous of one machine is on loopback: the machine's own name often does not resolve on a laptop.
    facts = preflight.facts(
        name, HOST, options.folder, Path(xscale_launch.__file__).parents[1], gpus
    )
    return _report(
        [facts],
        [str(problem) for problem in preflight.find_problems([facts], [name], gpus, options.disk)],
    )


def _task(options: argparse.Namespace, gpus: int) -> int:
    """Check one node. The head node prints the result of all; the others exit with 0 so that srun prints nothing."""
    variables = environment()
    node = variables.get("SLURMD_NODENAME", socket.gethostname())
    rank_env = slurm_ranks(variables, 1)[0]
    with tempfile.TemporaryDirectory(dir=options.folder, prefix=".doctor-") as folder:
        result = check_node(node, rank_env, variables, Path(folder), gpus, options.disk)
        problems = list(result.problems)
        measured = not (problems or options.no_links) and links.should_measure(rank_env, variables)
        if measured:
            # The folder may not be shared; only the head node reads the result written there.
            problems += map(
                str,
                links.measure(
                    LINKS, links.rank_of_node(rank_env, variables), node, variables, Path(folder)
                ),
            )
        if rank_env.rank > 0:
            return status.DONE
        if measured and not problems:
            pairs = links.read_results(Path(folder))
            for (first, second), speed in pairs.items():
                write(f"{first} - {second}: {speed:.2f} GB/s")
            problems += map(str, links.find_problems(pairs, 0.0))
    return _report(result.nodes, problems)


def _rank(options: argparse.Namespace, gpus: int) -> int:
    """Check the node of one rank that mpirun started; rank 0 prints the result of all."""
    result = mpi_preflight.MpiPreflightResult()

    def check(world: Any, rank_env: RankEnv) -> None:
        nonlocal result
        links_command = "" if options.no_links else shlex.join(LINKS)
        required = mpi_preflight.PreflightOptions(Path(folder), gpus, options.disk, links_command)
        result = mpi_preflight.run_preflight(world, rank_env, environment(), required)

    with tempfile.TemporaryDirectory(dir=options.folder, prefix=".doctor-") as folder:
        rank_env = rank_from_mpi(check)
    if rank_env is None:
        say("the ranks of mpirun need mpi4py: pip install mpi4py on each node")
        return status.USER_MISTAKE
    if rank_env.rank > 0:
        return status.DONE
    for first, second, speed in result.pairs:
        write(f"{first} - {second}: {speed:.2f} GB/s")
    return _report(result.nodes, result.problems)


def _report(nodes: Sequence[preflight.NodeFacts], problems: Sequence[str]) -> int:
    write(preflight.table(nodes))
    write("\n".join(problems) if problems else "no problems found")
    return FAULTY if problems else status.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
